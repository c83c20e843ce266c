"""Check that a data set's token ids belong to a model's tokenizer: decoded, they must give the text column."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from megatoken.datasets.tables import PromptTable
from megatoken.errors import DatasetError

ROWS_DECODED = 32
LEAST_WORDS = 5  # too few to distinguish tokenizers
LEAST_SHARE = 0.8  # of a text's words that the decoded ids must contain; decoding leaves out special tokens
_WORD = re.compile(r"\w+")


def check_tokenizer(table: PromptTable, decode: Callable[[list[int]], str]) -> int:
    """Decode rows spread over the table and compare them with their text; returns how many were long enough to compare.

    The ids may hold more than the text (CNN/DailyMail: the instruction), but the text's words must be among theirs.
    ``decode`` leaves out special tokens; ``token_lists`` has checked the table. Without a text column nothing is
    compared.

    Raises:
        DatasetError: The ids of a row belong to another tokenizer.
    """
    if "text" not in table.columns:
        return 0
    texts = table.columns["text"]
    compared = 0
    for row in range(0, len(texts), max(1, len(texts) // ROWS_DECODED)):
        text = texts[row]
        words = Counter(_WORD.findall(text.lower())) if isinstance(text, str) else Counter()
        if words.total() < LEAST_WORDS:
            continue
        found = words & Counter(_WORD.findall(decode(table.token_ids(row)).lower()))
        share = found.total() / words.total()
        if share < LEAST_SHARE:
            columns = table.data_set.columns
            raise DatasetError(
                f"{table.path}, row {row}: {columns['tokens']} does not decode to {columns['text']}: "
                f"{100 * share:.0f} % of its"
                f" words match; the ids are of {table.data_set.tokenizer}, use a model with that tokenizer"
            )
        compared += 1
    return compared
