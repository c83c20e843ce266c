"""The engines compared by ``cpu_offline.py``: their environments, the child processes that run them, the measuring."""
