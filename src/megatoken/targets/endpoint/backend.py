"""Servers over HTTP as a backend: what they serve, what they know, and the client processes that load them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from threading import Event, Thread
from typing import Any, TypeVar

from megatoken.config import RunConfig
from megatoken.datasets.requests import ChatRequest
from megatoken.engine.checkpoint import read_config
from megatoken.engine.config import REFERENCE, SHAPES, model_folder
from megatoken.engine.request import Request
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CheckpointError, UsageError, need_packages
from megatoken.runs.reasons import reason
from megatoken.targets.backend import Reporter, ServedModel, tokenizer_of
from megatoken.targets.endpoint.address import Address, AnswerError, ask, read_key, trust
from megatoken.targets.endpoint.answers import Answer, BrokenAnswerError
from megatoken.targets.endpoint.bodies import PATHS, Api, Asking, body_of
from megatoken.targets.endpoint.clients import Clients, LocalProcess, default_processes
from megatoken.targets.endpoint.connection import RETRIED
from megatoken.targets.endpoint.failures import ServerEnd
from megatoken.targets.endpoint.hosts import client_hosts
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.self_test import process_capacity
from megatoken.targets.endpoint.server_process import LOOK_SECONDS, end_of, started_server
from megatoken.targets.endpoint.target import EndpointTarget
from megatoken.targets.endpoint.wire import ClientSettings

SHOW_SECONDS = 1.0
FAST_SECONDS = 10.0  # within which a server that runs says what it serves
PROBE_TOKENS, PROBE_IDS = 4, (5, 6, 7, 8)
WRONG_FIELD = (400, 422)  # statuses with which servers refuse a field
# Version of a ``megatoken serve`` without a model.
_STAND_IN = re.compile(r"[^+]+\+(mock|simulated\.(?P<gpu>[\w .-]+))")
_Found = TypeVar("_Found")


class EndpointBackend:
    """The servers at ``config.endpoint.addresses``, which must serve the same model."""

    def __init__(self, config: RunConfig, reporter: Reporter) -> None:
        """Reads addresses, key and certificates. Raises UsageError."""
        need_packages("--endpoint", "serve", "httptools", "uvloop")
        self._config = config
        self._reporter = reporter
        self._addresses = tuple(Address.parse(url) for url in config.endpoint.addresses)
        if len(set(self._addresses)) < len(self._addresses):
            raise UsageError("--endpoint: an address is given twice; name each server once")
        self._key = read_key(config.endpoint.api_key_file)
        self._tls = [trust(one.secure, config.endpoint.ca_file) for one in self._addresses]
        self._served: ServedModel | None = None
        self._listed: dict[str, Any] = {}
        self._servers: list[dict[str, Any]] = []  # what each says of itself
        self._returns_ids = False  # the server, of its answers
        self._ids_of: Callable[[str, str], tuple[int, ...]] | None = None
        self._log: str | None = None
        self._server_end: Callable[[], ServerEnd | None] = lambda: None

    @contextmanager
    def open(self) -> Iterator[EndpointBackend]:
        """Starts the server, if the configuration says how, for as long as the context lasts.

        Raises:
            UsageError: it does not become ready, or another server of this machine has one of the addresses.
        """
        endpoint = self._config.endpoint
        with ExitStack() as stack:
            if endpoint.start_server is not None:
                for address in self._addresses:
                    if address.taken(endpoint.connect_seconds):  # that server would be measured, not the started one
                        raise UsageError(
                            f"--start-server: {address.url} answers already: stop that server, or leave out"
                            " --start-server"
                        )
                wanted = self._config.out / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-server.log"
                self._reporter.stage("starting the server")
                ready = lambda: self._models(0)  # noqa: E731
                server = started_server(endpoint.start_server, wanted, ready, endpoint.start_seconds)
                process, log = stack.enter_context(server)
                self._log, self._server_end = str(log), lambda: end_of(process, log)
            yield self

    def served(self) -> ServedModel:
        """What the first server lists, after a check that the others list it too. Raises MegatokenError."""
        if self._served is None:
            wanted = self._config.endpoint.served_model
            for at, address in enumerate(self._addresses):
                try:
                    listed = self._when_ready(address, lambda at=at: self._models(at))  # type: ignore[misc]
                except AnswerError as error:
                    if error.status in (404, 405) and wanted is not None:
                        continue  # it has no list
                    raise error.ends_command() from None
                if wanted is None and not listed:
                    raise UsageError(f"--endpoint {address.url}: it lists no model; give --served-model")
                wanted = wanted if wanted is not None else next(iter(listed))
                if listed and wanted not in listed:
                    raise UsageError(f"--endpoint {address.url}: it serves {', '.join(listed)}, not {wanted}")
                self._listed = self._listed or listed.get(wanted, {})
            assert wanted is not None
            _check_model(self._config.model, wanted)
            self._servers = [self._server(at) for at in range(len(self._addresses))]
            self._served = self._model(wanted)
        return self._served

    def tokenizer(self) -> Tokenizer | None:
        """That of ``model``; the default model's only where the server serves it."""
        return tokenizer_of(self._config.model) if self._knows_model() else None

    def facts(self) -> Mapping[str, Any]:
        """None before the servers are asked."""
        return {}

    @contextmanager
    def load(self) -> Iterator[EndpointTarget]:
        """Asks the server what it knows, and starts the client processes. Raises MegatokenError without an answer."""
        config, endpoint, served = self._config, self._config.endpoint, self.served()
        self._reporter.stage(f"asking {self._addresses[0].name} for a first answer")
        asking = self._probe(served.name)
        stream = config.scenario != "offline" if endpoint.stream is None else endpoint.stream
        settings = ClientSettings(
            self._addresses,
            self.api,
            self._key,
            str(endpoint.ca_file) if endpoint.ca_file else None,
            stream,
            endpoint.timeout_seconds,
            endpoint.connect_seconds,
            watch_metrics=True,
        )
        tokenizer = self.tokenizer()
        count = (lambda text: len(tokenizer.encode(text, add_special=False))) if tokenizer is not None else None
        with self._clients(settings) as clients:
            target = EndpointTarget(
                settings,
                asking,
                {"target": self._target_facts(stream, asking), "servers": self._servers},
                clients=clients,
                max_in_flight=endpoint.max_in_flight,
                observations=Observations(count),
                ids_of=self._ids_of,
                server_end=self._server_end,
            )
            try:
                yield target
            finally:
                target.close()

    @contextmanager
    def _clients(self, settings: ClientSettings) -> Iterator[Clients]:
        """The client processes, which have measured what they can hold."""
        endpoint = self._config.endpoint
        self._reporter.stage("measuring what the client can hold")
        if endpoint.hosts is None:
            self_test, processes = asdict(process_capacity()), endpoint.processes or default_processes()
            started = [LocalProcess(settings.of(number, processes)) for number in range(processes)]
            try:
                for process in started:
                    process.wait_until_ready()
            except BaseException:  # a signal too
                for process in started:
                    process.close()
                raise
            yield Clients(started, self_test)
            return
        with client_hosts(endpoint.hosts, settings, endpoint.processes, self._reporter.note) as clients:
            yield clients

    @property
    def api(self) -> Api:
        """The route: the user's, else by what the prompts are."""
        if self._config.endpoint.api is not None:
            return self._config.endpoint.api
        file = self._config.prompts
        if file is None or not file.is_file():
            return "completions"
        with file.open("rb") as opened:
            first = opened.readline(1 << 20)
        try:
            return "chat" if "messages" in json.loads(first) else "completions"
        except (ValueError, TypeError):
            return "completions"

    def _knows_model(self) -> bool:
        return self._config.model != REFERENCE or self.served().name == REFERENCE

    def _model(self, name: str) -> ServedModel:
        config = self._config
        shape = None
        if config.model != REFERENCE or name == REFERENCE:
            with suppress(CheckpointError):  # of a kind that our own engine does not know
                shape = SHAPES.get(config.model) or read_config(model_folder(config.model))
            longest = self._listed.get("max_model_len")
            if shape is not None and isinstance(longest, int) and 1 < longest < shape.max_positions:
                shape = replace(shape, max_positions=longest)
        ids = self.api == "completions" and shape is not None
        notes = [reason("ENDPOINT", urls=[one.url for one in self._addresses], api=self.api)]
        if made_up := self._stand_in():
            notes.append(reason("MADE_UP_TOKENS", gpu=made_up["gpu"]))
        if config.mode == "accuracy" or config.compliance is not None:
            self._returns_ids = self._gives_ids(name)
            if not self._returns_ids and config.compliance is None and shape is not None:
                self._ids_of = _ids_of_text(tokenizer_of(config.model), shape.end_token_ids)
                notes += [reason("IDS_FROM_TEXT")] if self._ids_of is not None else []
        return ServedModel(
            name,
            None,
            config.endpoint.max_in_flight,
            shape=shape,
            prompts="token_ids" if ids else "text",
            answers="token_ids" if self._returns_ids or self._ids_of is not None else "text",
            notes=tuple(notes),
        )

    def _models(self, at: int) -> dict[str, dict[str, Any]]:
        """The models that a server lists, by name. Raises AnswerError."""
        address = self._addresses[at]
        data = self._ask(at, f"{address.path}/models", FAST_SECONDS)
        try:
            return {one["id"]: one for one in json.loads(data)["data"] if isinstance(one["id"], str)}
        except (ValueError, TypeError, KeyError):
            raise AnswerError(
                f"{address.url}/models: not a list of models; is this the address of OpenAI's API?"
            ) from None

    def _when_ready(self, address: Address, question: Callable[[], _Found]) -> _Found:
        """The answer; a server that is still starting, or is asked too often, says so with status 503 or 429.

        Raises:
            MegatokenError: it is not ready after ``start_seconds``.
            AnswerError: it gives another answer.
        """
        longest = self._config.endpoint.start_seconds
        deadline, reported = time.monotonic() + longest, False
        while True:
            try:
                return question()
            except AnswerError as error:
                if error.status not in RETRIED:
                    raise
                if time.monotonic() > deadline:
                    advice = f"; not ready after {longest:g} s: look at its log, or raise --endpoint.start_seconds"
                    raise error.ends_command(advice) from None
                if not reported:
                    status = f"HTTP {error.status}"
                    self._reporter.stage(f"waiting for {address.name} to be ready ({status}), at most {longest:g} s")
                    reported = True
                time.sleep(LOOK_SECONDS)

    def _gives_ids(self, name: str) -> bool:
        try:
            return bool(self._try(Asking(name, forces=False, ids=True)).token_ids)
        except AnswerError:
            return False

    def _probe(self, name: str) -> Asking:
        """Whether the server knows how to force lengths; one short answer each way, to a prompt of the run's kind."""
        ids = self.served().prompts == "token_ids"
        asking = Asking(name, True, self._returns_ids)
        try:
            self._when_ready(self._addresses[0], lambda: self._try(asking, ids=ids))
            return asking
        except AnswerError as error:
            if error.status not in WRONG_FIELD:
                raise error.ends_command() from None
        plainly = Asking(name, False, self._returns_ids)
        try:
            self._try(plainly, ids=ids)
        except AnswerError as error:
            raise error.ends_command() from None
        return plainly

    def _try(self, asking: Asking, *, ids: bool = False) -> Answer:
        """One short answer, to a prompt of token ids if ``ids``. Raises AnswerError."""
        text = "Hello"
        request: Request = Request(PROBE_IDS if ids else text, max_tokens=PROBE_TOKENS, ignore_end_token=True)
        if self.api == "chat":
            request = ChatRequest(text, max_tokens=PROBE_TOKENS, ignore_end_token=True, messages=(("user", text),))
        address = self._addresses[0]
        body = body_of(request, self.api, asking, stream=False)
        seconds = self._config.endpoint.timeout_seconds
        data = self._ask(0, f"{address.path}{PATHS[self.api]}", seconds, body, "endpoint.timeout_seconds")
        answer = Answer(self.api, keep_text=False)
        try:
            answer.take_body(data)
        except BrokenAnswerError as error:
            raise AnswerError(f"{address.url}: {error}") from None
        return answer

    def _ask(
        self, at: int, path: str, seconds: float, body: Mapping[str, Any] | None = None, setting: str = ""
    ) -> bytes:
        """``address.ask`` of a server, which shows how long it has not answered."""
        address, over, began = self._addresses[at], Event(), time.monotonic()
        text = f"asking {address.name}, at most {seconds:g} s"

        def show() -> None:
            while not over.wait(SHOW_SECONDS):
                self._reporter.waiting(text, 1, time.monotonic() - began)

        watch = Thread(target=show, name="waiting", daemon=True)
        watch.start()
        try:
            return ask(address, path, key=self._key, tls=self._tls[at], seconds=seconds, body=body, setting=setting)
        finally:
            over.set()
            watch.join()

    def _target_facts(self, stream: bool, asking: Asking) -> dict[str, Any]:
        return {
            "kind": "endpoint",
            "urls": [one.url for one in self._addresses],
            "api": self.api,
            "stream": stream,
            "served_model": asking.model,
            "forces_lengths": asking.forces,
            "token_ids": asking.ids,
            "max_in_flight": self._config.endpoint.max_in_flight,
            "timeout_seconds": self._config.endpoint.timeout_seconds,
            **({"server_log": self._log} if self._log else {}),
            **({"stand_in": made_up[1]} if (made_up := self._stand_in()) else {}),
        }

    def _stand_in(self) -> re.Match[str] | None:
        """What makes tokens up in a server that has no model, by its version."""
        return next((found for one in self._servers if (found := _STAND_IN.fullmatch(one["version"] or ""))), None)

    def _server(self, at: int) -> dict[str, Any]:
        """Version and limits of a server, where it reports them."""
        address = self._addresses[at]
        try:
            began = time.monotonic()
            stated = json.loads(self._ask(at, f"{address.root}/version", FAST_SECONDS))
            version, seconds = str(stated["version"]), time.monotonic() - began
        except (AnswerError, ValueError, TypeError, KeyError):
            version, seconds = None, None
        longest = self._listed.get("max_model_len")
        return {"url": address.url, "version": version, "max_model_len": longest, "round_trip_seconds": seconds}


def _check_model(model: str, served: str) -> None:
    """Refuses a ``--model`` without files that is not the name that is ``served`` either. Raises UsageError."""
    folder = model_folder(model)
    if (
        model == served
        or model in SHAPES
        or any((folder / name).is_file() for name in ("tokenizer.json", "config.json"))
    ):
        return
    what = "it has no tokenizer.json and no config.json" if folder.is_dir() else "no such folder"
    raise UsageError(
        f"--model {model}: {what}; give the folder of the tokenizer of {served}, which the server serves, or leave it"
        " out; --served-model chooses among the server's models"
    )


def _ids_of_text(
    tokenizer: Tokenizer | None, end_token_ids: tuple[int, ...]
) -> Callable[[str, str], tuple[int, ...]] | None:
    """Token ids of an answer's text; one that ended by itself ends with the first end token, as a model's own does."""
    if tokenizer is None:
        return None

    def ids_of(text: str, finish_reason: str) -> tuple[int, ...]:
        return (*tokenizer.encode(text, add_special=False), *(end_token_ids[:1] if finish_reason == "stop" else ()))

    return ids_of
