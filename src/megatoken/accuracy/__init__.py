"""Scores of answers as MLPerf's references compute them, their targets, and compliance tests."""
