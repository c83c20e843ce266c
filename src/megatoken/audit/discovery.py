"""Walking the audited folder: its files, which of them belong together, and what the names of folders say."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from megatoken.audit.evidence import Role
from megatoken.audit.view import Place, RunFiles
from megatoken.errors import UsageError
from megatoken.mlperf.benchmarks import SCENARIOS
from megatoken.text import natural

MOST_ENTRIES = 2_000_000
DIVISIONS = ("closed", "open", "network")
_LOG = re.compile(r"(?P<prefix>.*mlperf_log_)(?P<kind>summary|detail|accuracy|trace)(?P<suffix>.*)\.(?:txt|json)")
_BENCHMARK = re.compile(
    r"(?i)(?:llama|mixtral|deepseek|gpt|bert|resnet|retinanet|3d-unet|rnnt|dlrm|stable-diffusion|rgat|pointpainting|whisper|"
    r"qwen|wan|yolo)[\w.-]*"
)
_COMPLIANCE = re.compile(r"TEST\d\d")


@dataclass
class Tree:
    """All regular files below a folder, and what a submission must not hold. Paths relative to the root, with /."""

    root: Path
    files: dict[str, int] = field(default_factory=dict)  # path -> bytes
    folders: set[str] = field(default_factory=set)
    empty_folders: list[str] = field(default_factory=list)
    broken_links: list[str] = field(default_factory=list)
    folder_links: list[str] = field(default_factory=list)  # not followed
    outside_links: list[str] = field(default_factory=list)  # to a file outside the root; not read
    special: list[str] = field(default_factory=list)  # pipes, sockets, devices
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # folder, why

    def path(self, relative: str) -> Path:
        """Where a file of the tree stands."""
        return self.root / relative if relative else self.root

    def children(self, folder: str) -> list[str]:
        """Names of the files directly in ``folder``."""
        return self._names.get(folder, [])

    def holding(self, name: str) -> list[str]:
        """Every folder with a file of that name, in natural order."""
        return sorted((folder for folder, names in self._names.items() if name in names), key=natural)

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        table: dict[str, list[str]] = {}
        for path in self.files:
            folder, _, name = path.rpartition("/")
            table.setdefault(folder, []).append(name)
        return table


def walk(root: Path, progress: Callable[[int], None] | None = None) -> Tree:
    """Lists a folder. Links to folders are not followed, so that a loop of links ends nowhere.

    Raises UsageError: ``root`` is no folder, cannot be read, or holds more than MOST_ENTRIES entries.
    """
    root = root.resolve()
    tree, todo, seen = Tree(root), [""], 0
    while todo:
        folder = todo.pop()
        try:
            with os.scandir(tree.path(folder)) as entries:
                names = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if not folder:
                raise UsageError(f"{root}: cannot be read ({error.strerror})") from None
            tree.unreadable.append((folder, error.strerror or str(error)))
            continue
        if folder and not names:
            tree.empty_folders.append(folder)
        for entry in names:
            seen += 1
            path = f"{folder}/{entry.name}" if folder else entry.name
            if _take(tree, path, entry):
                tree.folders.add(path)
                todo.append(path)
        if seen > MOST_ENTRIES:
            raise UsageError(f"{root}: holds more than {MOST_ENTRIES:,} files; audit a folder below it")
        if progress:
            progress(seen)
    return tree


def _take(tree: Tree, path: str, entry: os.DirEntry[str]) -> bool:
    """Notes an entry; True if it is a folder to walk into."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return True
        if entry.is_symlink():
            _take_link(tree, path, entry)
            return False
        status = entry.stat(follow_symlinks=False)
    except OSError as error:
        tree.unreadable.append((path, error.strerror or str(error)))
        return False
    if stat.S_ISREG(status.st_mode):
        tree.files[path] = status.st_size
    else:
        tree.special.append(path)
    return False


def _take_link(tree: Tree, path: str, entry: os.DirEntry[str]) -> None:
    try:
        target = Path(entry.path).resolve(strict=True)
    except (OSError, RuntimeError):
        tree.broken_links.append(path)
        return
    if target.is_dir():
        tree.folder_links.append(path)
    elif not target.is_relative_to(tree.root):
        tree.outside_links.append(path)
    elif target.is_file():
        tree.files[path] = target.stat().st_size
    else:
        tree.special.append(path)


def below(folder: str, path: str) -> str:
    """``path`` below a folder of a tree, whose root is the empty text."""
    return f"{folder}/{path}" if folder else path


def innermost(path: str, folders: Set[str]) -> str | None:
    """The innermost of ``folders`` that is or holds ``path``."""
    while path and path not in folders:
        path = path.rpartition("/")[0]
    return path if path in folders else None


def runs_in(tree: Tree) -> list[RunFiles]:
    """Every set of LoadGen's logs, in natural order of their paths (node 2 before node 10)."""
    groups: dict[tuple[str, str, str], dict[str, str]] = {}
    for path in tree.files:
        folder, _, name = path.rpartition("/")
        found = _LOG.fullmatch(name)
        if found:
            groups.setdefault((folder, found["prefix"], found["suffix"]), {})[found["kind"]] = path
    runs = [
        run_files(tree, folder, kinds)
        for (folder, _, _), kinds in sorted(groups.items(), key=lambda item: [natural(text) for text in item[0]])
        if kinds.keys() & {"summary", "detail", "accuracy"}
    ]
    return _named_apart(runs)


def run_files(tree: Tree, folder: str, logs: Mapping[str, str]) -> RunFiles:
    """The logs of one run, by kind, and what the names of the folders above them say."""
    inside = folder.split("/") if folder else []
    place = asdict(place_of([*tree.root.parts[1:], *inside], len(inside)))
    place["node"] = place["node"] or _own_name([tree.root.name, *inside])
    paths = set(logs.values())
    return RunFiles(
        **place,
        folder=folder,
        detail=logs.get("detail"),
        summary=logs.get("summary"),
        accuracy=logs.get("accuracy"),
        others=tuple(name for name in tree.children(folder) if below(folder, name) not in paths),
        size_bytes=sum(tree.files[path] for path in paths),
    )


def _own_name(parts: Sequence[str]) -> str:
    """The last folder whose name says more than what kind of log it holds."""
    plain = ("", "mlperf", "performance", "accuracy", "results", "run_1", *SCENARIOS)
    return next((part for part in reversed(parts) if part.lower() not in plain), parts[0])


def place_of(parts: Sequence[str], inside: int) -> Place:
    """Reads ``.../<division>/<submitter>/results/<system>/<benchmark>/<scenario>/performance/run_1`` and the like.

    Args:
        parts: Names of all folders down to the log's.
        inside: How many of them are below the audited folder; the others count only below the name of a benchmark.
    """
    outer = len(parts) - inside
    role = {"ranging": Role.RANGING, "accuracy": Role.ACCURACY}.get(parts[-1] if parts else "", Role.PERFORMANCE)
    if any(_COMPLIANCE.fullmatch(part) for part in parts[outer:] or parts[-3:]):
        role = Role.COMPLIANCE
    last = range(max(0, len(parts) - 6), len(parts))
    at = max((place for place in last if _BENCHMARK.fullmatch(parts[place])), default=-1)
    known = at >= 0
    benchmark = parts[at] if known else None
    named = parts[at + 1 : at + 2] if known else parts[outer:][::-1]
    scenario = next((SCENARIOS[part.lower()] for part in named if part.lower() in SCENARIOS), None)
    believed = at > 0 and (at - 1 >= outer or "results" in parts[max(0, at - 3) : at])
    system = node = parts[at - 1] if believed else None
    if "nodes" in parts[outer:-1]:
        node = parts[last_of(parts, "nodes") + 1]
    submitter = division = None
    for name in ("results", "compliance"):
        if name in (parts[:at] if known else parts):
            index = last_of(parts, name)
            if index >= 2 and parts[index - 2] in DIVISIONS:
                submitter, division = parts[index - 1], parts[index - 2]
                role = Role.COMPLIANCE if name == "compliance" else role
                break
    return Place(role, node, benchmark, scenario, system, submitter, division)


def last_of(parts: Sequence[str], name: str) -> int:
    """Where ``name`` occurs last."""
    return len(parts) - 1 - parts[::-1].index(name)


def _named_apart(runs: list[RunFiles]) -> list[RunFiles]:
    """Nodes of one kind of run get different names: the part of their paths that differs, where names are alike."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.role, run.benchmark, run.scenario, run.submitter, run.division), []).append(index)
    for indexes in groups.values():
        if len({runs[i].node for i in indexes}) == len(indexes):
            continue
        paths = [runs[i].folder.split("/") for i in indexes]
        depth = min(len(path) for path in paths)
        differing = [place for place in range(depth) if len({path[place] for path in paths}) > 1]
        for i, path in zip(indexes, paths, strict=True):
            name = path[differing[0]] if differing else ""
            alike = sum(other[differing[0]] == name for other in paths) if differing else 0
            runs[i] = replace(runs[i], node=name if alike == 1 else runs[i].folder or runs[i].node)
    return runs
