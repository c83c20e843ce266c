"""Files of work -> requests and the answers expected of them: MLPerf's data sets, prompts, token lengths, profiles."""
