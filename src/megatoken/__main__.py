"""The ``megatoken`` command, and ``python -m megatoken``."""

# Until ``main`` handles the signals, Ctrl-C ends the process as the others do, without a traceback of an import.
# ``signal`` would import ``enum``, which takes most of the time that is left until then.
import _signal  # type: ignore[import-not-found]

_signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from megatoken.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
