"""Users who hold conversations: what they send, when, and how real answers join the history."""

import json
from pathlib import Path

import pytest

from cli_support import call_here, make_checkpoint
from megatoken.datasets.conversations import Conversation, Conversations, Turn, read_conversations
from megatoken.datasets.requests import ChatRequest
from megatoken.errors import DatasetError
from megatoken.harness.sweep.users import Medium, Talk, Users, _that_fit
from megatoken.runs.run import read_run

SECOND = 10**9


def users_of(talk: Talk, count: int, medium: Medium, max_length: int | None = None) -> Users:
    return Users(talk, count, (1,), medium=medium, tokenizer=None, vocabulary_size=100, max_length=max_length)


def source(*talks: Conversation) -> Conversations:
    return Conversations("c", "c", "0", talks)


def test_a_history_grows_with_real_answers_and_ends_with_the_conversation() -> None:
    users = users_of(Talk(source(Conversation((Turn(5, 3), Turn(2, 3)))), 0.0, shared_prefix_tokens=4), 1, "ids")
    users.start(0)
    assert [tuple(arrival) for arrival in users.take_due(0)] == [(0, 0)]
    first = list(users.data_set.requests[0].prompt)
    assert len(first) == 9 == users.data_set.input_tokens[0]
    users.take(0, [7, 8, 9], "", 0)
    users.ended(0, SECOND)
    assert [tuple(arrival) for arrival in users.take_due(SECOND)] == [(SECOND, 0)]
    second = list(users.data_set.requests[0].prompt)
    assert second[:12] == [*first, 7, 8, 9]
    assert len(second) == 14
    users.take(1, [1], "", 0)
    users.ended(1, 2 * SECOND)
    third = list(users.data_set.requests[0].prompt)
    assert third[:4] == first[:4]  # the shared prefix
    assert len(third) == 9


@pytest.mark.parametrize(("answered", "max_length"), [(False, None), (True, 13)])
def test_a_failed_turn_and_a_full_context_begin_another_conversation(answered: bool, max_length: int | None) -> None:
    users = users_of(Talk(source(Conversation((Turn(5, 3), Turn(5, 3)))), 0.0), 1, "ids", max_length)
    users.start(0)
    users.take_due(0)
    if answered:
        users.take(0, [7, 8, 9], "", 0)
    users.ended(0, SECOND)
    assert users.data_set.input_tokens[0] == 5


def test_messages_of_a_chat_alternate_and_users_think_between_turns() -> None:
    talk = Talk(source(Conversation((Turn(1, 3, "hello"), Turn(1, 3, "more")), system="be short")), 10.0)
    users = users_of(talk, 200, "chat")
    users.start(0)
    first = users.take_due(10 * SECOND)
    assert len(first) == 200
    assert sum(arrival.due_ns for arrival in first) / 200 == pytest.approx(5 * SECOND, rel=0.2)
    for sample in range(200):
        users.take(sample, [], f"answer {sample}", 1)
        users.ended(sample, 10 * SECOND)
    waits = [arrival.due_ns / SECOND - 10 for arrival in users.take_due(10_000 * SECOND)]
    assert sum(waits) / 200 == pytest.approx(10, rel=0.25)
    request = users.data_set.requests[first[0].row]
    assert isinstance(request, ChatRequest)
    assert request.messages == (
        *(("system", "be short"), ("user", "hello")),
        *(("assistant", "answer 0"), ("user", "more")),
    )


def test_words_that_no_tokenizer_counts_may_have_two_tokens_each() -> None:
    """Those of the reference model's tokenizer have 1.6; a server refuses what exceeds its context."""
    short, long = Conversation((Turn(40, 20), Turn(40, 20))), Conversation((Turn(41, 20),))
    assert _that_fit(Talk(source(short, long), 0.0), 100, None, "chat").conversations == (short,)
    assert _that_fit(Talk(source(short, long), 0.0), 100, None, "ids").conversations == (short, long)
    users = users_of(Talk(source(short), 0.0), 1, "chat", 100)
    users.start(0)
    users.take_due(SECOND)
    users.take(0, [], "an answer", 2)
    users.ended(0, SECOND)
    (request,) = users.data_set.requests
    assert isinstance(request, ChatRequest) and len(request.messages) == 1  # of another conversation


def test_files_of_conversations(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    turns = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "a b c"}, {"from": "human", "value": "x"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": [{"from": "gpt", "value": "no"}]}]))
    read = read_conversations(file).counted(lambda text: len(text.split()))
    assert read.conversations == (Conversation((Turn(2, 3, "one two"), Turn(1, 128, "x"))),)
    assert "1 conversation without a turn" in read.notes[0]
    lines = tmp_path / "chat.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "abcdefgh"}]
    lines.write_text(json.dumps({"messages": messages}))
    read = read_conversations(lines).counted(None)
    assert read.conversations == (Conversation((Turn(2, 128, "abcdefgh"),), "s"),)
    assert "estimated" in read.notes[0]
    for bad in ("[", "[]", '[{"conversations": [3]}]'):
        file.write_text(bad)
        with pytest.raises(DatasetError, match=r"share\.json"):
            read_conversations(file)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--users", "2"), "what they say"),
        (("--users", "2", "--profile", "rag", "--rates", "1"), "is itself a load"),
        (("--users", "2", "--profile", "none"), "unknown workload profile"),
        (("--think", "2"), "go with --users"),
        (("--users", "2", "--profile", "rag", "--think", "-1"), "--think"),
    ],
)
def test_what_users_refuse(wrong: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, _, err = call_here("sweep", *wrong, "--out", tmp_path / "none")
    assert code == 2
    assert message in err


def test_a_sweep_of_users_of_the_real_engine(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    turns = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d e"}] * 2
    file.write_text(json.dumps([{"conversations": turns}]))
    model = make_checkpoint(tmp_path / "model", tokenizer=True)
    engine = ("--engine.threads", 1, "--engine.max_sequences", 4, "--warm-up", 0.1, "--settle", 0.1, "--window", 1)
    code, _, err = call_here(
        *("sweep", "--model", model, "--users", "3", "--conversations", file, "--think", 0.01, "--shared-prefix", 6),
        *(*engine, "--out", tmp_path / "out"),
    )
    assert code == 0, err
    (path,) = (tmp_path / "out").iterdir()
    document = json.loads((path / "sweep.json").read_text())
    assert document["load_kind"] == "users"
    (run,) = [read_run(folder) for folder in path.iterdir() if folder.is_dir()]
    sizes = sorted(set(run.requests["input_tokens"].to_pylist()))
    assert len(sizes) == 2  # first and second turns
    assert sizes[0] > 6
    assert run.result["load"]["shared_prefix_tokens"] == 6
    code, out, _ = call_here("audit", run.path)
    assert code == 0, out
