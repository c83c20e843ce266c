"""The engine process: loads the model, steps it on a thread, and connects it to the HTTP processes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import ModelConfig, model_folder
from megatoken.engine.request import Request, check_options
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CapacityError, ExitCode, MegatokenError
from megatoken.serve.child import Control, read_settings, run_loop
from megatoken.serve.engine_client import fault
from megatoken.serve.hub import EngineSizes, Hub, Link, SharedEngine
from megatoken.serve.messages import ServedModel
from megatoken.serve.mock_engine import MockEngine
from megatoken.serve.options import EngineProcessSettings, ServeConfig

MOCK_SEQUENCES = 65_536
MOCK_PAGE_TOKENS = 16
SWITCH_SECONDS = 0.0005  # Python's 5 ms would hold up a step that is due while this thread handles the one before
FLUSH_SECONDS = 0.2  # for the last errors to reach the HTTP processes


@dataclass(frozen=True, slots=True)
class _Opened:
    engine: SharedEngine
    close: Callable[[], None]
    model: ServedModel
    sizes: EngineSizes
    check: Callable[[Request], object]


def _open_real(options: ServeConfig, hub: Hub) -> _Opened:
    from megatoken.engine import Engine, EngineThread  # loads PyTorch

    engine = Engine(options.model, options.engine_config(), random_weights=options.random_weights, seed=options.seed)
    memory = engine.memory_plan
    if memory.max_length < 2:
        raise CapacityError(
            f"the longest sequence has {memory.max_length} token, but a prompt and its answer need at least 2; "
            "raise engine.max_length or engine.cache_tokens"
        )
    sizes = EngineSizes(memory.max_sequences, memory.max_batched_tokens, memory.cache_tokens, memory.page_size)
    model = _served(options, engine.model_config, memory.max_length)
    thread = EngineThread(engine, hub.take_step)

    def close() -> None:
        thread.close()
        engine.close()  # ends the processes of other ranks

    return _Opened(thread, close, model, sizes, engine.check)


def _open_mock(options: ServeConfig, hub: Hub) -> _Opened:
    source = open_model(options.model, random_weights=True)
    shape = source.config
    model = _served(options, shape, shape.max_positions)
    vocabulary = list(range(min(shape.vocabulary_size, 64)))
    if model.tokenizer_file is not None:
        tokenizer = Tokenizer(model.tokenizer_file)
        plain = [one for one in range(min(shape.vocabulary_size, tokenizer.largest_id + 1)) if _is_word(tokenizer, one)]
        vocabulary = plain or vocabulary
    engine = MockEngine(shape, vocabulary, options.tokens_per_second, hub.take_step, MOCK_SEQUENCES)
    cache_tokens = MOCK_SEQUENCES * shape.max_positions
    sizes = EngineSizes(MOCK_SEQUENCES, cache_tokens, cache_tokens, MOCK_PAGE_TOKENS)
    return _Opened(engine, engine.close, model, sizes, check_options)


def _is_word(tokenizer: Tokenizer, token_id: int) -> bool:
    text = tokenizer.decode([token_id])
    return text.strip().isalpha() and text.isascii()


def _served(options: ServeConfig, shape: ModelConfig, max_length: int) -> ServedModel:
    folder = model_folder(options.model)
    return ServedModel(
        name=options.served_model_name or shape.name,
        max_length=max_length,
        vocabulary_size=shape.vocabulary_size,
        folder=folder.resolve() if folder.is_dir() else None,
        created=int(time.time()),
    )


async def _serve(settings: EngineProcessSettings, control: Control) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    loop = asyncio.get_running_loop()
    options = settings.options
    failed = loop.create_future()
    hub = Hub(
        options.max_queued,
        several_tenants=settings.several_tenants,
        restarts=options.restart,
        fail=failed.set_result,
    )
    listener = socket.socket(fileno=settings.listener)  # a collected socket, or server, closes its descriptor
    server = await loop.create_unix_server(lambda: Link(hub), sock=listener)
    watching = loop.create_task(hub.watch())
    try:
        opened = await asyncio.to_thread(_open_mock if options.engine_kind == "mock" else _open_real, options, hub)
    except MegatokenError as error:
        _leave(control, str(error), error.exit_code)
    except Exception as error:
        _leave(control, fault("the engine cannot be started", error), ExitCode.ERROR)
    hub.start(opened.engine, opened.model, opened.sizes, opened.check)
    control.send({"ready": True, "model": opened.model.name})
    stopping = loop.create_task(control.wait_for_stop())
    await asyncio.wait((stopping, failed), return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        await asyncio.sleep(FLUSH_SECONDS)
        _leave(control, failed.result(), ExitCode.ERROR)
    watching.cancel()
    server.close()
    await asyncio.to_thread(opened.close)
    os._exit(0)  # weights and cache go with the process


def _leave(control: Control, message: str, code: int) -> NoReturn:
    control.send({"error": message, "exit_code": int(code)})
    os._exit(code)


def main() -> None:
    """Entry of the process."""
    control, settings = read_settings(EngineProcessSettings)
    run_loop(control, _serve(settings, control))


if __name__ == "__main__":
    main()
