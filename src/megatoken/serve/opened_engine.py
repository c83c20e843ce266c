"""Opens the engine that a server asks for: one that computes, or the mock engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import DEFAULT_PRECISION, ModelConfig, model_folder
from megatoken.engine.process_memory import collect_garbage_rarely
from megatoken.engine.request import Request, check_options
from megatoken.engine.runner_protocol import RecordedSteps
from megatoken.engine.thread import Step
from megatoken.engine.tokenizer import Tokenizer
from megatoken.runs.reasons import reason
from megatoken.serve.child import Control
from megatoken.serve.hub import SharedEngine
from megatoken.serve.messages import EngineSizes, ServedModel
from megatoken.serve.mock_engine import MockEngine
from megatoken.serve.options import ServeConfig

if TYPE_CHECKING:
    from megatoken.engine.loop import Engine

MOCK_SEQUENCES = 65_536
MOCK_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine with its thread, and what the hub in front of it must know."""

    engine: SharedEngine
    close: Callable[[], None]
    model: ServedModel
    sizes: EngineSizes
    check: Callable[[Request], object]
    recorded: RecordedSteps | None = None
    chosen_precision: str | None = None  # where none was named and it is not the default

    def note_to(self, control: Control) -> None:
        """Report to the log what was chosen, and recorded before the first request."""
        if self.chosen_precision is not None:
            control.send({"note": reason("PRECISION_CHOSEN", precision=self.chosen_precision)["message"]})
        if self.recorded is not None:
            steps, seconds, memory_bytes = self.recorded
            control.send(
                {"note": f"{steps} steps recorded as CUDA graphs in {seconds:.1f} s, {memory_bytes / 1e6:,.0f} MB"}
            )


def open_engine(options: ServeConfig, on_step: Callable[[Step], None]) -> OpenedEngine:
    """Load the model; ``on_step`` is called on the engine's thread. Raises MegatokenError."""
    if options.engine_kind == "mock":
        return _open_mock(options, on_step)
    from megatoken.engine import Engine
    from megatoken.hardware.precision import settle_fastest

    config, chosen = options.engine_config(), None
    if options.simulated_gpu is not None:
        engine = Engine.simulated(options.model, config, options.simulated_gpu)
    else:  # loads PyTorch
        if options.precision is None:
            source = open_model(options.model, random_weights=options.random_weights, seed=options.seed)
            config = replace(config, precision=settle_fastest(source, config)[0].precision)
            chosen = config.precision if config.precision != DEFAULT_PRECISION else None
        engine = Engine(options.model, config, random_weights=options.random_weights, seed=options.seed)
    return replace(share_engine(options, engine, on_step), chosen_precision=chosen)


def share_engine(options: ServeConfig, engine: Engine, on_step: Callable[[Step], None]) -> OpenedEngine:
    """Step an engine on a thread. Raises CapacityError if its cache is too small for any answer."""
    from megatoken.engine import EngineThread

    memory = engine.memory_plan
    memory.check_answers()
    sizes = EngineSizes(memory.max_sequences, memory.max_batched_tokens, memory.cache_tokens, memory.page_size)
    model = _served(options, engine.model_config, memory.max_length)
    collect_garbage_rarely()
    thread = EngineThread(engine, on_step)

    def close() -> None:
        thread.close()
        engine.close()  # ends the processes of other ranks

    return OpenedEngine(thread, close, model, sizes, engine.check, engine.recorded)


def _open_mock(options: ServeConfig, on_step: Callable[[Step], None]) -> OpenedEngine:
    source = open_model(options.model, random_weights=True)
    shape = source.config
    model = _served(options, shape, shape.max_positions)
    vocabulary = list(range(min(shape.vocabulary_size, 64)))
    if model.tokenizer_file is not None:
        tokenizer = Tokenizer(model.tokenizer_file)
        plain = [one for one in range(min(shape.vocabulary_size, tokenizer.largest_id + 1)) if _is_word(tokenizer, one)]
        vocabulary = plain or vocabulary
    engine = MockEngine(shape, vocabulary, options.tokens_per_second, on_step, MOCK_SEQUENCES)
    cache_tokens = MOCK_SEQUENCES * shape.max_positions
    sizes = EngineSizes(MOCK_SEQUENCES, cache_tokens, cache_tokens, MOCK_PAGE_TOKENS)
    return OpenedEngine(engine, engine.close, model, sizes, check_options)


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
