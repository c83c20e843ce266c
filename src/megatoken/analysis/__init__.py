"""Run data -> statistics, aggregation, comparison, stability, goodput, energy. Pure functions."""
