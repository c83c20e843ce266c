"""A request inside an engine: checked, encoded, with everything that its next token depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatoken.engine.adjustments import Adjustments, BadWords, adjustments_of
from megatoken.engine.config import ModelConfig
from megatoken.engine.request import Request, Sampling

if TYPE_CHECKING:
    from megatoken.engine.grammar import Guide
    from megatoken.engine.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A checked request and the tokens generated so far."""

    request: Request
    prompt: list[int]
    stop_ids: frozenset[int]
    sampling: Sampling  # with a seed wherever tokens are drawn
    generated: list[int]
    adjustments: Adjustments | None = None
    plain: bool = True  # its next token is the one with the highest logit, and no logprobs are wanted
    draws_from_all: bool = False  # at its temperature, and nothing else changes the logits or excludes tokens
    page_keys: list[bytes] = field(default_factory=list)  # of its full pages, if there is a prefix cache
    text: TextStream | None = None  # if its events carry text

    def tokens(self, start: int, count: int) -> list[int]:
        """``count`` of its ids from position ``start`` on, prompt and generated."""
        prompt = len(self.prompt)
        if start + count <= prompt:
            return self.prompt[start : start + count]
        return self.prompt[start:] + self.generated[max(start - prompt, 0) : start + count - prompt]

    @property
    def ended(self) -> bool:
        """Whether its last token ends it."""
        return bool(self.generated) and self.generated[-1] in self.stop_ids


def activate(
    request: Request,
    prompt: list[int],
    model: ModelConfig,
    *,
    text: TextStream | None = None,
    guide: Guide | None = None,
    bad_words: BadWords | None = None,
) -> ActiveRequest:
    """A checked request, ready to be queued.

    ``text`` makes the text of its events; ``guide`` leads along its grammar; ``bad_words`` are its own.
    """
    stop_ids = frozenset(request.stop_token_ids)
    if not request.ignore_end_token:
        stop_ids |= frozenset(model.end_token_ids)
    adjustments = adjustments_of(request, prompt, stop_ids, model.vocabulary_size, guide, bad_words)
    wants_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
    plain = request.sampling.temperature == 0 and adjustments is None and not wants_logprobs
    sampling = request.sampling
    draws_from_all = adjustments is None and sampling.temperature > 0
    draws_from_all &= (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
    return ActiveRequest(request, prompt, stop_ids, sampling, [], adjustments, plain, draws_from_all, text=text)
