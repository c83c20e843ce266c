"""Users who hold conversations: each asks, reads the answer, thinks, and asks again; real answers join the history.

A closed loop: a slow target is asked less often. A user begins at a random moment of the first pause, so that not all
ask at once. A user whose request fails, or whose history no longer fits the context, begins another conversation.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatoken.datasets.conversations import Conversation, Conversations, Turn
from megatoken.datasets.requests import ChatRequest, Dataset, LazyRows
from megatoken.engine.request import Request
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import UsageError
from megatoken.harness.prepare import Prepared
from megatoken.harness.protocols import Counted
from megatoken.harness.sizing import OwnLoad
from megatoken.harness.sweep.loads import Arrival
from megatoken.harness.sweep.plan import Setup, load_facts
from megatoken.harness.sweep.point import Phases
from megatoken.runs.reasons import Reason, reason
from megatoken.targets import Target
from megatoken.text import count_of

Medium = Literal["ids", "chat", "text"]
COMMON = (  # words of random texts: short, so about a token each
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one"
    " you were all her she there would their we him been has when who will no more if out so up said what its"
)
WORDS = COMMON.split()
MOST_TOKENS_A_WORD = 2.0  # where no tokenizer counts: 1.6 by the reference model's, about 1 by larger ones
STAGGER_SECONDS = 1.0  # over which users begin who do not pause


@dataclass(frozen=True, slots=True)
class Talk:
    """What users say, and how long they think."""

    conversations: Conversations  # that users draw from, each on its own
    think_seconds: float  # mean of the exponential time from an answer to the user's next turn
    # the same from a conversation to the user's next one; None: as ``think_seconds``
    pause_seconds: float | None = None
    shared_prefix_tokens: int = 0  # random tokens that every conversation begins with


@dataclass(slots=True)
class _User:
    talk: Conversation
    turn: int = 0
    history: list[int] = field(default_factory=list)  # ids
    messages: list[tuple[str, str]] = field(default_factory=list)
    answered: bool = False


class Users:
    """The load, its requests, and the reader of the answers.

    Attributes:
        data_set: one row for each user: what it sends next.
    """

    waits = True

    def __init__(
        self,
        talk: Talk,  # what they say
        users: int,  # how many
        seed: Sequence[int],  # of conversations, pauses and random tokens
        *,
        medium: Medium,  # token ids, the messages of a chat, or one text
        tokenizer: Tokenizer | None,  # of ids for recorded texts
        vocabulary_size: int,  # of random ids
        max_length: int | None,  # of a history with its answer; None: unknown
    ) -> None:
        """Takes what users say and what the target takes."""
        self._talk, self._medium, self._tokenizer = talk, medium, tokenizer
        self._vocabulary_size, self._max_length = vocabulary_size, max_length
        self._draws = random.Random(repr((tuple(seed), users)))
        shared = random.Random(repr(tuple(seed)))
        self._prefix_ids = [shared.randrange(vocabulary_size or 1) for _ in range(talk.shared_prefix_tokens)]
        self._prefix_words = " ".join(shared.choice(WORDS) for _ in range(talk.shared_prefix_tokens))
        self._users = [self._begin() for _ in range(users)]
        self._due: list[tuple[int, int]] = []
        self._user_of: dict[int, int] = {}
        self._issued = 0
        self._sizes = np.zeros((2, users), np.int64)
        source = talk.conversations
        self.data_set = Dataset(
            name=source.name,
            source=source.source,
            requests=LazyRows(users, self._request),
            content_hash=source.content_hash,
            input_tokens=self._sizes[0],
            output_limits=self._sizes[1],
            fills_limit=np.ones(users, np.bool_),
            notes=source.notes,
            prompts_counted=medium == "ids",
        )
        for at in range(users):
            self._prepare(at)

    def start(self, now_ns: int) -> None:
        """Users begin at random moments of the first pause."""
        spread = 1e9 * (self._talk.think_seconds or (STAGGER_SECONDS if len(self._users) > 1 else 0.0))
        self._due = [(now_ns + round(self._draws.random() * spread), at) for at in range(len(self._users))]
        heapq.heapify(self._due)

    def take_due(self, now_ns: int) -> list[Arrival]:
        """The users who ask now."""
        due = []
        while self._due and self._due[0][0] <= now_ns:
            moment, at = heapq.heappop(self._due)
            self._user_of[self._issued] = at
            self._issued += 1
            due.append(Arrival(moment, at))
        return due

    def ended(self, request: int, now_ns: int) -> None:
        """The user thinks, then asks again: the next turn, or the first of another conversation."""
        at = self._user_of.pop(request)
        user, talk = self._users[at], self._talk
        pause = talk.think_seconds
        own = user.talk.turns[user.turn].think_seconds
        user.turn += 1
        if not user.answered or user.turn == len(user.talk.turns) or not self._fits(user):
            self._users[at] = self._begin()
            pause = talk.think_seconds if talk.pause_seconds is None else talk.pause_seconds
        elif own is not None:
            pause = own
        user.answered = False
        self._prepare(at)
        heapq.heappush(self._due, (now_ns + round(1e9 * self._draws.expovariate(1 / pause)) if pause else now_ns, at))

    def next_due_ns(self) -> int | None:
        """When the next user asks."""
        return self._due[0][0] if self._due else None

    def take(self, sample: int, token_ids: Sequence[int], text: str, first_characters: int) -> Counted | None:
        """Adds an answer to the history of its user."""
        user = self._users[self._user_of[sample]]
        user.answered = True
        if user.talk.carries:
            user.history += token_ids
            user.messages.append(("assistant", text))
        else:
            self._forget(user)
        return None

    def close(self) -> None:
        """Nothing to end."""

    def _begin(self) -> _User:
        """A user with a conversation of its own choice."""
        user = _User(self._draws.choice(self._talk.conversations.conversations))
        self._forget(user)
        return user

    def _forget(self, user: _User) -> None:
        """Leaves what every turn begins with."""
        system = "\n".join(filter(None, (self._prefix_words, user.talk.system)))
        user.messages = [("system", system)] if system else []
        user.history = list(self._prefix_ids)
        if user.talk.system and self._medium == "ids":
            user.history += self._encode(user.talk.system)

    def _prepare(self, at: int) -> None:
        """Adds the turn of a user to the history, and notes its lengths."""
        user = self._users[at]
        turn = user.talk.turns[user.turn]
        if self._medium == "ids":
            user.history += self._ids(turn)
        else:
            user.messages.append(("user", turn.text or self._words(turn.tokens)))
        self._sizes[:, at] = len(user.history), turn.answer_tokens

    def _fits(self, user: _User) -> bool:
        """Whether the next turn and its answer leave room."""
        turn = user.talk.turns[user.turn]
        length = len(user.history) if self._medium == "ids" else self._about(user)
        next_turn = math.ceil(_tokens_a_word(turn, self._tokenizer, self._medium) * turn.tokens)
        return self._max_length is None or length + next_turn + turn.answer_tokens <= self._max_length

    def _about(self, user: _User) -> int:
        """Tokens of messages: by the tokenizer, else the most that their words may have."""
        words = " ".join(content for _, content in user.messages)
        return len(self._encode(words)) if self._tokenizer else math.ceil(MOST_TOKENS_A_WORD * len(words.split()))

    def _request(self, at: int) -> Request:
        user = self._users[at]
        options: dict[str, Any] = {"max_tokens": int(self._sizes[1, at]), "ignore_end_token": True}
        if self._medium == "ids":
            return Request(list(user.history), **options)
        words = "\n".join(content for _, content in user.messages)
        if self._medium == "chat":
            return ChatRequest(words, **options, messages=tuple(user.messages))
        return Request(words, **options)

    def _ids(self, turn: Turn) -> list[int]:
        if turn.text is not None:
            return self._encode(turn.text)
        return [self._draws.randrange(self._vocabulary_size) for _ in range(turn.tokens)]

    def _words(self, tokens: int) -> str:
        return " ".join(self._draws.choices(WORDS, k=max(1, tokens)))

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise UsageError(
                f"{self._talk.conversations.name}: texts need the model's tokenizer.json; give --model DIR"
            )
        return self._tokenizer.encode(text, add_special=False)


@dataclass(frozen=True, slots=True)
class UsersPlan:
    """Loads of users who hold conversations."""

    values: tuple[float, ...]  # numbers of users, rising
    talk: Talk  # what they say
    phases: Phases  # of every point
    medium: Medium  # what the target takes
    tokenizer: Tokenizer | None  # of the model, where it is known
    vocabulary_size: int  # of the model; 0: unknown
    max_length: int | None  # of its context; None: unknown
    kind: str = field(default="users", init=False)
    finds_its_end: bool = field(default=False, init=False)

    def own_load(self) -> OwnLoad:
        """A request of each user."""
        return OwnLoad(in_flight=max(self.values))

    def loads(self, estimated_rate: float) -> Iterator[float]:
        """The numbers of users."""
        return iter(self.values)

    def setup(self, value: float, data_set: Dataset, seed: Sequence[int], folder: Path | None) -> Setup:
        """The users of one point."""
        users = Users(
            self.talk,
            round(value),
            seed,
            medium=self.medium,
            tokenizer=self.tokenizer,
            vocabulary_size=self.vocabulary_size,
            max_length=self.max_length,
        )
        return Setup(users, users.data_set, users)

    def facts(self, value: float, seed: int) -> dict[str, Any]:
        """The field ``load`` of a point's ``result.json``, as far as it is known before the point runs."""
        talk = self.talk
        pause = talk.think_seconds if talk.pause_seconds is None else talk.pause_seconds
        return {
            **load_facts(self.kind, value, seed, self.phases, waits=True),
            "source": talk.conversations.source,
            "think_seconds": talk.think_seconds,
            "pause_seconds": pause,
            "shared_prefix_tokens": talk.shared_prefix_tokens,
        }

    def notes(self) -> list[Reason]:
        """What a reader of a point must know."""
        return [reason("NOTE", text=note) for note in self.talk.conversations.notes]


def users_plan(values: tuple[float, ...], talk: Talk, phases: Phases, prepared: Prepared, target: Target) -> UsersPlan:
    """The loads for a target: ids where it takes them, else messages, or one text where it has no route of chats."""
    model = prepared.model
    api = target.facts().get("target", {}).get("api")
    medium: Medium = "chat" if api in ("chat", "responses") else "text"
    if model.prompts == "token_ids" and model.shape is not None:
        medium = "ids"
    longest = model.max_length
    size = model.shape.vocabulary_size if model.shape else 0
    if longest is not None:
        talk = replace(talk, conversations=_that_fit(talk, longest, prepared.tokenizer, medium))
    phases = replace(phases, warm_up_seconds=phases.warm_up_seconds + talk.think_seconds)  # until all users have begun
    return UsersPlan(values, talk, phases, medium, prepared.tokenizer, size, longest)


def _tokens_a_word(turn: Turn, tokenizer: Tokenizer | None, medium: Medium) -> float:
    """The most real tokens of each token that a turn is said to have."""
    return 1.0 if medium == "ids" or (tokenizer and turn.text is not None) else MOST_TOKENS_A_WORD


def _that_fit(talk: Talk, longest: int, tokenizer: Tokenizer | None, medium: Medium) -> Conversations:
    """The conversations whose first turn and answer fit a context, however many tokens words have that none counted."""
    source = talk.conversations

    def fits(one: Conversation) -> bool:
        system = len(tokenizer.encode(one.system, add_special=False)) if one.system and tokenizer else 0
        first = one.turns[0]
        prompt = _tokens_a_word(first, tokenizer, medium) * (talk.shared_prefix_tokens + first.tokens) + system
        return prompt + first.answer_tokens <= longest

    kept = tuple(one for one in source.conversations if fits(one))
    if not kept:
        raise UsageError(
            f"{source.name}: no conversation begins within the context of {longest:,} tokens; use shorter ones, or a"
            " shorter --shared-prefix"
        )
    left_out = len(source.conversations) - len(kept)
    if not left_out:
        return source
    count, context = count_of(left_out, "conversation"), f"the context of {longest:,} tokens"
    note = f"{count} left out, whose first turn and answer may exceed {context}"
    return replace(source, conversations=kept, notes=(*source.notes, note))
