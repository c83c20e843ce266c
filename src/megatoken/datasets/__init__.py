"""Files -> requests and expected answers: MLPerf's data sets, prompts, token lengths."""
