"""All tasks: a row of prompt and answer, drawn from a seeded generator.

Every answer follows from its prompt alone, and the question says how to write it, so one wording of it is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from reference_model import arithmetic, lists, records, stories
from reference_model.problem import Problem

TASKS: dict[str, tuple[int, Callable[[Random], Problem]]] = {
    "copy_text": (9, lists.copy_text),
    "replace_word": (5, lists.replace_word),
    "reverse_list": (5, lists.reverse_list),
    "sort_words": (6, lists.sort_words),
    "count_word": (5, lists.count_word),
    "tally": (3, lists.tally),
    "filter_kind": (4, lists.filter_kind),
    "deduplicate": (4, lists.deduplicate),
    "change_case": (3, lists.change_case),
    "spell": (3, lists.spell),
    "pair_lists": (3, lists.pair_lists),
    "add": (6, arithmetic.add),
    "add_columns": (5, arithmetic.add_columns),
    "subtract": (5, arithmetic.subtract),
    "multiply": (4, arithmetic.multiply),
    "sort_numbers": (6, arithmetic.sort_numbers),
    "filter_numbers": (5, arithmetic.filter_numbers),
    "progression": (3, arithmetic.progression),
    "number_words": (4, arithmetic.number_words),
    "story": (10, stories.story),
    "table_value": (8, records.table_value),
    "table_rows": (5, records.table_rows),
    "table_extreme": (4, records.table_extreme),
    "table_columns": (4, records.table_columns),
    "convert_records": (6, records.convert),
    "convert_dates": (4, records.convert_dates),
}
"""Task -> weight and generator. The weights say how often it is drawn, for training and the held-out set alike."""

_NAMES = tuple(TASKS)
_CUMULATIVE_WEIGHTS = tuple(accumulate(weight for weight, _ in TASKS.values()))


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt with its reference.

    Attributes:
        task: A key of ``TASKS``.
        prompt: The whole prompt; it ends with a line break, so that the answer starts a line.
        answer: The reference, without an end token.
        key: 8 bytes that two rows share if they pose the same problem, in whatever wording.
    """

    task: str
    prompt: str
    answer: str
    key: bytes


def draw(rng: Random) -> Row:
    """One row, of a task drawn by weight. The instruction stands first, or (one time in four) last."""
    task = rng.choices(_NAMES, cum_weights=_CUMULATIVE_WEIGHTS)[0]
    problem = TASKS[task][1](rng)
    parts = [problem.instruction, problem.given]
    if rng.random() < 0.25:
        parts.reverse()
    key = hashlib.blake2b(f"{problem.given}\n{problem.answer}".encode(), digest_size=8).digest()
    return Row(task, "\n".join([*parts, "Answer:\n"]), problem.answer, key)
