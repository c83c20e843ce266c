"""What MLPerf is, once: rounds, benchmarks, seeds, limits, log formats, draws, early stopping, compliance."""
