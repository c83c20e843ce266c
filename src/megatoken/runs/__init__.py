"""The run folder: its layout, its tables, writing it while a run lasts, reading it years later, SQL over many."""
