"""A page as PDF, printed by a browser that is installed: no PDF library is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from megatoken.errors import MegatokenError
from megatoken.files import write_atomically

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge", "chrome")
MOST_SECONDS = 120.0
FLAGS = ("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--no-first-run")


def print_page(page: Path) -> Path | None:
    """Print a page next to itself, ``dossier.html`` as ``dossier.pdf``; None where no browser is installed.

    Raises:
        MegatokenError: the browser does not print.
        StorageError: the disk refuses.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return None
    with TemporaryDirectory(prefix="megatoken-print-", ignore_cleanup_errors=True) as folder:
        printed = Path(folder) / "page.pdf"
        # Chromium refuses its sandbox to root; the page is ours, runs one script, and asks for nothing.
        alone = ("--no-sandbox",) if os.geteuid() == 0 else ()
        own = (f"--user-data-dir={folder}/profile", "--no-pdf-header-footer", f"--print-to-pdf={printed}")
        command = [browser, *FLAGS, *alone, *own, page.absolute().as_uri()]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MegatokenError(f"{page}: {browser} does not print it ({error}); print it from a browser") from None
        if not printed.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            why = lines[-1] if lines else f"exit code {done.returncode}"
            raise MegatokenError(f"{page}: {browser} does not print it ({why:.200}); print it from a browser")
        place = page.with_suffix(".pdf")
        write_atomically(place, lambda temporary: temporary.write_bytes(printed.read_bytes()))
    return place
