"""Frames between processes: what goes in comes out, however the bytes are cut."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from megatoken.engine.request import FinishReason, TokenEvent
from megatoken.errors import RequestError
from megatoken.framing import FrameReader, frame
from megatoken.serve.messages import Busy, Kind, pickled, step_events, step_frame, unpickled


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
