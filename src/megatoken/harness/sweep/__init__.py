"""Loads beyond LoadGen's: closed loops by concurrency, open loops by rate, traces; sweeps over them."""
