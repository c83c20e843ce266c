"""Frames between processes: what goes in comes out, however the bytes are cut."""

from __future__ import annotations

import pickle
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.engine.request import FinishReason, Grammar, GrammarKind, Request, Sampling, Thought, TokenEvent
from megatoken.errors import RequestError
from megatoken.framing import FrameReader, frame
from megatoken.serve.messages import (
    Busy,
    Kind,
    Submission,
    pickled,
    step_events,
    step_frame,
    submission_frame,
    submission_of,
    unpickled,
)
from megatoken.serve.tenants import Tenant


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 50), min_size=1))
def test_frames_survive_any_cut(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frame(Kind.STEP, one) for one in payloads)
    reader, found, at = FrameReader(), [], 0
    while at < len(data):
        size = cuts[len(found) % len(cuts)]
        found += list(reader.feed(data[at : at + size]))
        at += size
    assert found == [(Kind.STEP, one) for one in payloads]


def test_events_of_a_step_come_back_with_their_types() -> None:
    others = [
        TokenEvent(7, (1, 2), FinishReason.LENGTH, None, (), 3),
        TokenEvent(8, (), FinishReason.ERROR, RequestError("bad")),
    ]
    ((_, payload),) = FrameReader().feed(step_frame([1, 2], [10, 20], others))
    plain, second, third, fourth = step_events(payload)
    assert [plain, second, third] == [TokenEvent(1, (10,), None), TokenEvent(2, (20,), None), others[0]]
    assert fourth[:3] == others[1][:3] and isinstance(fourth.error, RequestError) and str(fourth.error) == "bad"


def test_busy_keeps_its_fields() -> None:
    ((_, payload),) = FrameReader().feed(pickled(Kind.STATUS, Busy("full", 3)))
    found = unpickled(payload)
    assert (type(found), str(found), found.retry_after_seconds) == (Busy, "full", 3)
    assert str(pickle.loads(pickle.dumps(found))) == "full"


def test_a_submission_comes_back_whole() -> None:
    sampling = Sampling(0.5, 3, 0.9, 7, 0.1, 1.1, 0.2, 0.3, {5: 1.5})
    grammar = Grammar(GrammarKind.REGEX, "a+", Thought(3, 2, 9))
    request = Request(
        array("i", [1, 2]), 5, sampling, (9,), True, 2, 1, 0, ("x",), grammar, "salt", ("bad",), (4, 5), "group", 2.0
    )
    submission = Submission(3, request, Tenant("key", 2.0, 1, 2, 3, 4), 17, 1, True, 2)
    ((_, payload),) = FrameReader().feed(submission_frame(submission))
    assert submission_of(payload) == submission


def test_what_no_message_is_made_of_is_refused_every_time() -> None:
    for _ in range(2):
        with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
            unpickled(pickle.dumps(print))
