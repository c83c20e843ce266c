"""Loads beyond LoadGen's: closed loops by concurrency, open loops by rate, traces, conversations; sweeps over them."""
