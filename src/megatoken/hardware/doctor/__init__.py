"""What keeps megatoken, or its number, from this machine's best, with the command that fixes it. Changes nothing."""

from megatoken.hardware.doctor.examine import examine

__all__ = ["examine"]
