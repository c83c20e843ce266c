"""The seal of a run folder: every file is as it was when the folder was sealed."""

from __future__ import annotations

from collections.abc import Iterator

from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import places
from megatoken.audit.finding import Observation, Outcome, Severity, check, outcome, shown
from megatoken.runs.seal import SEAL, SealState, seal_state

MOST_NAMED = 20


def check_seals(tree: Tree) -> Iterator[Observation]:
    """Every sealed folder, also one that lacks files without which it is no run folder."""
    for file in sorted(tree.files):
        if file == SEAL or file.endswith(f"/{SEAL}"):
            yield from sealed(tree, file.removesuffix(SEAL).rstrip("/"))


@check("run_folder.sealed", "The sealed files are unchanged", "A change after sealing is not what was measured.")
def sealed(tree: Tree, path: str) -> Outcome:
    """A signature that cannot be checked here is unknown."""
    where = places(below(path, SEAL))
    expected = "every file as it was sealed"
    try:
        state = seal_state(tree.path(path))
    except (OSError, ValueError) as error:
        return outcome(False, expected, shown(f"the seal cannot be read: {error}"), where)
    assert state is not None
    if not state.whole:
        return outcome(False, expected, shown("; ".join(_problems(state))), where)
    found = f"nothing changed since {state.sealed_at}"
    if state.public_key is None:
        return outcome(True, expected, f"{found}; not signed, so anyone could have sealed it", where)
    if state.signature is None:
        return Outcome(Severity.UNKNOWN, expected, shown(f"{found}; signature not checked: {state.unchecked}"), where)
    return outcome(True, expected, shown(f"{found}; signed by {state.public_key}"), where)


def _problems(state: SealState) -> Iterator[str]:
    if state.signature is False:
        yield "the signature is not that of the statement and key in the seal"
    for what, names in (("changed", state.changed), ("added", state.added), ("removed", state.removed)):
        if names:
            more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
            yield f"{what}: {', '.join(names[:MOST_NAMED])}{more}"
