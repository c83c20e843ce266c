"""How many tokens a whole answer has, by what they are counted, and what its counts show of the server."""

from __future__ import annotations

import time
import zlib

from megatoken.targets.endpoint import wire
from megatoken.targets.endpoint.answers import Answer, Flag
from megatoken.targets.endpoint.connection import Exchange
from megatoken.targets.endpoint.wire import Ended

OVER_TOKENS, OVER_SHARE = 1, 0.02  # beyond max_tokens, the larger: a counted end token, or rounding of a long answer
CUT_SHARE = 0.95  # of max_tokens; an answer that ends by length with fewer was cut


def report_of(exchange: Exchange) -> Ended:
    """The report of a request whose answer has come to its end."""
    answer, task = exchange.answer, exchange.task
    assert answer is not None
    answer.check_prompt_tokens(len(task.body))
    flags = answer.flags
    if answer.token_ids:
        tokens, counted_by = len(answer.token_ids), "ids"
    elif answer.output_tokens >= 0:
        tokens, counted_by = answer.output_tokens, "usage"
    else:
        tokens, counted_by = answer.frames, "frames"
    if tokens > task.max_tokens:
        flags |= Flag.OVER_LIMIT
    uncounted = _why_uncounted(answer, tokens, counted_by, task.max_tokens)
    if not uncounted:
        if answer.output_tokens < 0:
            flags |= Flag.NO_USAGE
        if answer.finish_reason == "length" and tokens < CUT_SHARE * task.max_tokens:
            flags |= Flag.CUT
        if task.forced and tokens < task.max_tokens and answer.finish_reason != "length":
            flags |= Flag.NOT_FORCED
        if 0 <= answer.output_tokens < answer.frames:
            flags |= Flag.FEWER_THAN_FRAMES
    times, frames = answer.times, answer.frames
    if counted_by == "usage" and answer.finish_reason == "stop" and tokens > frames > 0 and answer.ended_ns:
        # The end token is counted and has no text, but took a step.
        times.append(answer.ended_ns)
        frames += 1
    elif counted_by == "ids":
        frames = len(set(times))
    return Ended(
        wire.END,
        task.ticket,
        exchange.sent_ns,
        times[0] if answer.frames else 0,
        times[-1] if times else time.monotonic_ns(),
        answer.finish_reason,
        tokens,
        counted_by,
        answer.input_tokens,
        answer.cached_tokens,
        frames,
        times.tobytes() if answer.frames else b"",
        tuple(answer.token_ids),
        answer.text,
        int(flags),
        zlib.crc32(task.body),  # the same in every process
        answer.text_hash,
        answer.first_piece_hash,
        exchange.retries,
        answer.first_characters,
        uncounted,
    )


def _why_uncounted(answer: Answer, tokens: int, counted_by: str, max_tokens: int) -> str:
    if tokens > max_tokens + max(OVER_TOKENS, OVER_SHARE * max_tokens):
        return f"the answer has {tokens:,} tokens by its {counted_by}, but max_tokens allows {max_tokens:,}"
    if counted_by == "frames" and not answer.streamed:
        if answer.no_count is not None:
            return f"the answer's usage has {answer.no_count} output tokens, which is no count"
        return "the answer has no usage and is no stream, so its tokens cannot be counted; add --endpoint.stream true"
    return ""
