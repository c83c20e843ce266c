"""Somebody's artefacts -> findings: LoadGen's logs, MLPerf submissions, run folders, and claims about them."""
