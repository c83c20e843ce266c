"""The run folder: its layout, its tables, writing it during a run, reading it, also one of an older version."""
