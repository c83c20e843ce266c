"""Chats to prompts: the templates of a model, and the processes that render them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from megatoken.engine.tensor_files import one_line_errors, read_json
from megatoken.errors import CheckpointError, UsageError
from megatoken.files import UnreadableError, cause, read_text
from megatoken.serve.json_pipe import framed, receive_message
from megatoken.serve.request_errors import ApiError
from megatoken.serve.tenant_turns import TenantTurns

DEADLINE_SECONDS = 1.0
START_SECONDS = 60.0
MOST_WAITING = 64  # chats of one tenant; more are refused
_LARGEST_PROMPT_PER_TOKEN = 64  # characters; text that is longer for each token that fits is not a prompt
_SMALLEST_LIMIT = 1 << 16
_PIECES_OF_JSON = 1024  # made at a time, so that a large chat does not hold up the streams
_MAIN = "from megatoken.serve.template_process import main; main()"
_JSON = json.JSONEncoder()  # pure ASCII: texts may hold half surrogates
DEFAULT = "default"
TOOL_USE = "tool_use"


class ModelTemplates:
    """The chat templates that a model's folder brings, by name, and its special tokens, which templates write."""

    def __init__(self, folder: Path | None, file: Path | None = None) -> None:
        """Reads them.

        Args:
            folder: of the checkpoint, which may have none; None for a named shape.
            file: a template to use instead of the folder's own.

        Raises:
            CheckpointError: a file of the folder is not what it should be.
            UsageError: ``file`` cannot be read.
        """
        self.tokens: dict[str, str] = {}
        self.by_name: dict[str, str] = {}
        if folder is not None:
            self._read_folder(folder)
        if file is not None:
            try:
                self.by_name = {DEFAULT: file.read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"--chat-template {file}: cannot be read ({cause(error)}); give a jinja2 file"
                ) from error

    def _read_folder(self, folder: Path) -> None:
        config = _read_json(folder / "tokenizer_config.json")
        self.tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        self.by_name = _configured(config.get("chat_template"))
        for path in [*folder.glob("additional_chat_templates/*.jinja"), *folder.glob("chat_template.jinja")]:
            self.by_name[DEFAULT if path.name == "chat_template.jinja" else path.stem] = _read(path)

    def choose(self, tools: bool) -> str:
        """The name of the template for a chat. Raises ApiError: the model has none."""
        if tools and TOOL_USE in self.by_name:
            return TOOL_USE
        if DEFAULT in self.by_name:
            return DEFAULT
        also = f"; it has {', '.join(sorted(self.by_name))} and no default" if self.by_name else ""
        raise ApiError(
            f"this model has no chat template{also}; start the server with --chat-template FILE, "
            "or use /v1/completions",
            param="messages",
        )

    def mentions(self, name: str) -> bool:
        """Whether a template reads a variable of this name."""
        return any(re.search(rf"\b{name}\b", template) for template in self.by_name.values())


class TemplateRenderer:
    """A process that renders chats, started at the first one, and killed when one takes too long.

    Chats are rendered one after the other, those of tenants in turn; the event loop never waits for one. Those of
    clients that leave before their turn are not rendered.
    """

    def __init__(self, templates: ModelTemplates, max_length: int) -> None:
        """``max_length``: tokens of the longest prompt; a text that can never fit is refused."""
        self._largest = max(_SMALLEST_LIMIT, max_length * _LARGEST_PROMPT_PER_TOKEN)
        settings = {"templates": templates.by_name, "tokens": templates.tokens, "largest_text": self._largest}
        self._settings = framed(json.dumps(settings))
        self._process: asyncio.subprocess.Process | None = None
        self._turns = TenantTurns()
        self._waiting: Counter[str] = Counter()  # chats whose turn has not come, by tenant

    async def render(self, template: str, chat: dict[str, Any], tenant: str = "") -> str:
        """The prompt of a chat.

        Args:
            template: the name of one of the model's templates, or the text of another one.
            chat: what the template sees.
            tenant: whose chat it is.

        Raises:
            ApiError: the template fails, or takes too long; the chat is too large, or too many wait.
        """
        if self._waiting[tenant] >= MOST_WAITING:
            raise ApiError(
                f"{MOST_WAITING} chats wait for the chat template; send the request again later",
                HTTPStatus.TOO_MANY_REQUESTS,
                retry_after=1,
            )
        self._waiting[tenant] += 1
        try:
            job = framed(f'{{"template": {json.dumps(template)}, "chat": {await self._chat_json(chat)}}}')
            await self._turns.acquire(tenant)
        finally:
            self._waiting[tenant] -= 1
        rendering = asyncio.ensure_future(self._render(job))
        rendering.add_done_callback(self._rendered)
        return await asyncio.shield(rendering)  # if the client leaves, its answer is still taken off the pipe

    def _rendered(self, done: asyncio.Future[str]) -> None:
        """It is the next chat's turn, even if the client of this one has left."""
        self._turns.release()
        if not done.cancelled():
            done.exception()

    async def _chat_json(self, chat: dict[str, Any]) -> str:
        parts, size = [], 0
        for count, part in enumerate(_JSON.iterencode(chat), 1):
            parts.append(part)
            size += len(part)
            if size > self._largest:
                raise ApiError(
                    f"messages, tools and chat_template_kwargs have more than the {self._largest:,} characters that "
                    "can ever fit",
                    param="messages",
                    code="context_length_exceeded",
                )
            if count % _PIECES_OF_JSON == 0:
                await asyncio.sleep(0)
        return "".join(parts)

    async def _render(self, job: bytes) -> str:
        try:
            process = await self._started()
            answer = await asyncio.wait_for(_exchange(process, job), DEADLINE_SECONDS)
        except TimeoutError:
            await self.close()
            raise ApiError(
                f"the chat template did not end within {DEADLINE_SECONDS:g} s; shorten the messages or fix it"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            raise ApiError("the chat template ended its process: too little memory, or its own fault") from None
        if "error" in answer:
            raise ApiError(f"the chat template cannot render these messages: {answer['error']}", param="messages")
        return str(answer["text"])

    async def start(self) -> None:
        """Start the process before the first chat needs it; a failure is left to that chat."""
        await self._turns.acquire("")
        try:
            with suppress(OSError, EOFError):
                await self._started()
        finally:
            self._turns.release()

    async def close(self) -> None:
        """End the process; the next chat starts another one."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()  # not communicate: a chat, or the start, may be reading

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _MAIN,
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.DEVNULL,  # out of memory, it may end with a traceback, which is no news
                start_new_session=True,
            )
            try:
                await asyncio.wait_for(_exchange(process, self._settings), START_SECONDS)
            except TimeoutError:
                await self.close()  # its late answer would be taken for that to a chat
                raise ConnectionError("no answer") from None
        return self._process


async def _exchange(process: asyncio.subprocess.Process, job: bytes) -> Any:
    assert process.stdin is not None and process.stdout is not None
    if process.stdin.is_closing():  # uvloop would raise a RuntimeError
        raise ConnectionResetError("the process was ended")
    process.stdin.write(job)
    return await receive_message(process.stdout)


def _configured(value: Any) -> dict[str, str]:
    """Templates in ``tokenizer_config.json``: one, or several with names."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    if isinstance(value, dict):
        return {str(name): text for name, text in value.items() if isinstance(text, str)}
    return {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    with one_line_errors(path):
        return read_json(path) if path.is_file() else {}


def _read(path: Path) -> str:
    try:
        text, damages = read_text(path)
    except UnreadableError as error:
        raise CheckpointError(f"{path}: {error}; export the model again") from error
    if damages:
        raise CheckpointError(f"{path}: {damages[0].what}; export the model again")
    return text
