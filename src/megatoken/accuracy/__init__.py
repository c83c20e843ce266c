"""Answers against the answers expected: scores as MLPerf's references compute them, targets, compliance tests."""
