"""The shapes that steps are padded to where each new one would cost a recording, and those that come first.

Pure arithmetic: no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from megatoken.engine.batch import StepShape
from megatoken.engine.memory import GRAPH_CHUNKS

SHORTEST_TOKENS, LENGTH_RATIO = 512, 4
"""Shortest length of a sequence that steps are recorded for, and the ratio of each length to the one before."""
SAMPLES = (64, 256, 512)
"""Tokens that sample in steps longer than the last of these, next to one of each prompt: the head of a large vocabulary
takes a tenth of such a step. Shorter steps have room for any number, since each further size is another shape."""
MOST_GRAPHS = 128
"""Recorded steps that are kept at a time; ``memory.GRAPH_LAYER_BYTES`` is what they take."""
USUAL_LENGTH = 2048
"""Length of the longest sequence in most steps that are recorded at the start."""
FEW_SEQUENCES = 64
"""Up to so many, the steps of decodes alone are among the first to be recorded."""
LONG_DECODES, LONG_PROMPTS = 16, 128
"""Tokens of the steps that are recorded for the longest sequences: their page tables grow with tokens and length."""


class ShapeLadder:
    """Finds the shape of a step."""

    def __init__(self, sizes: Sequence[int], page_size: int, *, windowed: bool = False) -> None:
        """``sizes``: numbers of tokens that a step is padded to, ascending. ``windowed``: see ``StepShape``."""
        self._sizes = sizes
        self._page_size = page_size
        self._windowed = windowed

    def shape(self, tokens: int, *, decodes: int, prompts: bool, samples: int, length: int) -> StepShape:
        """``tokens``, ``decodes``, ``samples``: of the step. ``length``: of the longest sequence."""
        longest = SHORTEST_TOKENS
        while longest < length:
            longest *= LENGTH_RATIO
        size = self._sizes[bisect_left(self._sizes, tokens)]
        chunks = GRAPH_CHUNKS if prompts else 0
        rooms: tuple[int, ...] = ()
        if not decodes:
            rooms = (0,)
        elif size > SAMPLES[-1]:
            rooms = SAMPLES
        return StepShape(
            tokens=size,
            chunks=chunks,
            samples=next((room + chunks for room in rooms if room + chunks >= samples), size + chunks),
            longest=longest,
            pages=-(-longest // self._page_size),
            windowed=self._windowed,
        )

    def first(self, max_sequences: int, max_length: int) -> list[StepShape]:
        """The shapes to record before any request, the most useful first, at most ``MOST_GRAPHS``.

        Decodes with prompts cover every step of usual length. Prompts alone and few decodes are what a request meets
        that is alone, and long sequences are conversations whose beginning is cached.
        """
        usual, sizes = min(USUAL_LENGTH, max_length), self._sizes
        most_decodes = sizes[min(bisect_left(sizes, max_sequences), len(sizes) - 1)]

        def mixed(size: int) -> StepShape:
            return self.shape(size, decodes=size, prompts=True, samples=size + GRAPH_CHUNKS, length=usual)

        def prompts(size: int, length: int) -> StepShape:
            return self.shape(size, decodes=0, prompts=True, samples=1, length=length)

        def decodes(size: int, length: int) -> StepShape:
            return self.shape(size, decodes=size, prompts=False, samples=size, length=length)

        alone = [size for size in sizes if size <= most_decodes]
        shapes = [
            *map(mixed, sizes),
            *(prompts(size, usual) for size in sizes),
            *(decodes(size, usual) for size in alone if size <= FEW_SEQUENCES),
            *(decodes(size, max_length) for size in alone if size <= LONG_DECODES),
            *(prompts(size, max_length) for size in sizes if size <= LONG_PROMPTS),
            *(decodes(size, usual) for size in alone),
        ]
        return list(dict.fromkeys(shapes))[:MOST_GRAPHS]


def substitute(shape: StepShape, recorded: Iterable[StepShape]) -> StepShape | None:
    """The recorded shape that costs least among those of as many tokens that have room for a step of ``shape``."""
    roomy = [
        one
        for one in recorded
        if one.tokens == shape.tokens
        and one.chunks >= shape.chunks
        and one.samples >= shape.samples
        and one.longest >= shape.longest
    ]
    return min(roomy, key=lambda one: (one.longest, one.samples, one.chunks), default=None)
