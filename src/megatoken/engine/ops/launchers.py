"""Triton's launchers, loaded so that threads may compile kernels at the same time.

Triton (3.6, say) builds an extension module for each list of argument types, and all have the same name. Python then
keeps one module object for that name: loading a launcher again rewrites the object that another thread has just got, so
that its kernel is launched through a function for other arguments, and fails or reads them wrongly. Here one thread
loads at a time, and each launcher is a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

Load = Callable[[str, str], ModuleType]  # name and path of an extension module

_one_at_a_time = threading.Lock()


class CopyingLoader:
    """``load`` for several threads."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def __call__(self, name: str, path: str) -> ModuleType:
        """A module of its own with what the loaded one holds now."""
        with _one_at_a_time:
            copy = ModuleType(name)
            copy.__dict__.update(vars(self._load(name, path)))
        return copy


def make_loading_safe() -> None:
    """Have Triton load its launchers this way. A version of Triton that loads them elsewhere stays as it is."""
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is not None and not isinstance(load, CopyingLoader):
        build._load_module_from_path = CopyingLoader(load)
