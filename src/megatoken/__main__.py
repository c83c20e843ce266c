"""``python -m megatoken``."""

from megatoken.cli import main

main()
