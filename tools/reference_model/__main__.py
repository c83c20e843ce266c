"""Command line of the training: ``python -m reference_model --output FOLDER --seconds 300``."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    """Parse and train. PyTorch is imported late: worker processes import this module too and do without it."""
    from reference_model.train import SIZES, Options, default_workers, run

    parser = argparse.ArgumentParser(prog="reference_model", description="Train and export the reference model.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the exported model")
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--steps", type=int, help="train so many steps")
    end.add_argument("--seconds", type=float, help="train so long after the first step")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--start-from", type=Path, help="exported folder whose weights to go on from, with new data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes that draw training data")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    given = parser.parse_args(arguments)
    run(
        Options(
            output=given.output,
            size=given.size,
            steps=given.steps,
            seconds=given.seconds,
            start_from=given.start_from,
            seed=given.seed,
            workers=given.workers,
            compiled=not given.eager,
        )
    )


if __name__ == "__main__":
    main()
