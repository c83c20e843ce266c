"""The machine: inventory, telemetry, waiting for cores."""
