"""The memory plan: every size of an engine, computed from shapes before anything is allocated."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from megatoken.engine.config import EngineConfig, ModelConfig, sharded
from megatoken.engine.process_memory import HUGE_PAGES_FROM_BYTES
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.schemes import LinearScheme, scheme_of
from megatoken.engine.window_pages import most_window_pages, sequences_of_window_pages
from megatoken.errors import CapacityError, ConfigError

PARTIAL_RESULTS = 8192
"""Most sequences times pieces of each in a GPU's decode attention; bounds its scratch memory."""
PAGED_CONTEXT, GATHERED_QUERIES = 512, 512
"""A GPU reads prompts page by page if no context is longer than this, or if a key has fewer queries (tokens times query
heads); otherwise it gathers them first. Measured on one H200 (``h200-attention.json``). Gathering would pay from 500
tokens on, but recorded steps, whose contexts vary, are recorded with ``batch.USUAL_TOKENS``."""
GATHERED_HEAD_SIZES = (64, 128)
BLOCK_SAMPLES = 16
"""Tokens drawn at a time, which bounds the copies of their logits."""

PROCESS_BYTES = 300_000_000
"""Python, PyTorch and other libraries before the first weight; measured 224 to 260 MB."""
GPU_LIBRARY_BYTES = 2_000_000_000
"""GPU memory for kernels, cuBLAS workspaces and gaps between blocks, beyond what is in use when the plan is made."""
GRAPH_TOKENS: tuple[int, ...] = (1, 2, 4, 8, *range(16, 513, 16), *range(576, 1025, 64), *range(1152, 2049, 128))
GRAPH_CHUNKS = 8
"""Sizes that steps recorded as CUDA graphs are padded to, and most prompts in one."""
LAUNCH_SECONDS_PER_LAYER = 4e-4
"""Time of the host for about eleven launches."""
WINDOWS_SHARE = 0.25
"""Most of the cache that windows' pages take where neither ``max_sequences`` nor ``cache_tokens`` is given. Every
sequence that may run has its own; those of 3,072 would take half of the cache of gpt-oss-120b on one H200."""
GRAPH_LAYER_BYTES = 8_000_000
"""GPU memory that the driver keeps of all recorded graphs, for each layer; 4.9 MB were measured."""
GPU_COLLECTIVES_BYTES = 2_000_000_000
"""Memory of each GPU of a group, which NCCL takes at the first sum; without it 405B on four H200 ran out of memory. The
memory that ranks share replaces tensors of a step."""
EXPERT_SCALE_BYTES = 4
DEFAULT_MAX_LENGTH = 8192
DEFAULT_MAX_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
LARGE_WEIGHTS_TOKENS_ON_CPU = 1024  # large weights are read from memory in every step, so fewer steps read less
MOST_PADDING = 31  # tokens added to those of an expert on a CPU, see ``ops.cpu.padded_tokens``
WINDOWED_QUERIES_ON_CPU = 32
"""Queries of a layer with sinks or a window that attend at a time."""
DEFAULT_MAX_SEQUENCES_ON_CPU = 128  # on a GPU three quarters of the tokens; the others are for prompts
DEFAULT_PAGE_SIZE = 32
GPU_PAGE_SIZES = (16, 32, 64, 128)
LARGE_MODEL_PARAMETERS = 30e9
LARGE_MODEL_TOKENS_ON_GPU = 1536  # on one GPU, where a smaller step leaves more cache; see docs/performance.md. Not for
# mixtures, whose experts get only a part of a step's tokens each.
THROUGHPUT_TOKENS_ON_GPU = 4096
"""Of a smaller model whose steps may be long: the host's work and the reading of weights are shared by more tokens."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every derived size of an engine; bytes unless the name says tokens, pages or sequences."""

    device: str  # "cpu" or "cuda"
    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int
    process_bytes: int
    available_bytes: int
    page_size: int
    pages: int
    max_batched_tokens: int
    max_sequences: int
    max_length: int
    # Keys of the largest window, and the pages of their own that layers with windows have; 0 if they share all pages.
    window: int = 0
    window_pages: int = 0
    packed_weights: bool = False  # four-bit weights stay packed on a GPU

    @property
    def total_bytes(self) -> int:
        """Most memory that the engine's process will hold."""
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes + self.process_bytes

    @property
    def cache_tokens(self) -> int:
        """Tokens the cache holds; in layers with pages of their own only those in windows."""
        return self.pages * self.page_size

    def check_answers(self) -> None:
        """Refuse sizes that hold no prompt with an answer. Raises CapacityError."""
        if self.max_length < 2:
            raise CapacityError(
                f"the longest sequence has {self.max_length} token, but a prompt and its answer need at least 2; "
                "raise engine.max_length or engine.cache_tokens"
            )

    def scheduler(self, *, prefix_cache: bool = False) -> Scheduler:
        """A new scheduler of these sizes."""
        return Scheduler(
            max_batched_tokens=self.max_batched_tokens,
            max_sequences=self.max_sequences,
            page_size=self.page_size,
            num_pages=self.pages,
            max_length=self.max_length,
            prefix_cache=prefix_cache,
            window=self.window,
            window_pages=self.window_pages,
        )

    def lines(self) -> list[str]:
        """The plan as text, one fact a line."""
        libraries = "GPU libraries" if self.device == "cuda" else "Python and libraries"
        windows = f", {self.window_pages:,} more for windows of {self.window:,} tokens" if self.window_pages else ""
        packed = "  packed in four bits, expanded to fp8 in steps of many tokens" if self.packed_weights else ""
        return [
            f"device     {self.device}",
            f"weights    {_gigabytes(self.weights_bytes)}{packed}",
            f"KV cache   {_gigabytes(self.cache_bytes)}  {self.cache_tokens:,} tokens in {self.pages:,} "
            f"page{'s' * (self.pages != 1)} of {self.page_size}{windows}; filled as requests need it",
            f"workspace  {_gigabytes(self.workspace_bytes)}  steps of "
            f"{self.max_batched_tokens:,} token{'s' * (self.max_batched_tokens != 1)}",
            f"process    {_gigabytes(self.process_bytes)}  {libraries}",
            f"total      {_gigabytes(self.total_bytes)}  of {_gigabytes(self.available_bytes)} available",
            f"limits     {self.max_sequences:,} sequence{'s' * (self.max_sequences != 1)} at a time, "
            f"{self.max_length:,} tokens each",
        ]


def weight_bytes(model: ModelConfig, scheme: LinearScheme, device: str) -> int:
    """Bytes of the packed weights on a device, "cpu" or "cuda".

    On the CPU the packed head of a tied model is a copy of its embedding, fp8 values are held in bf16, and routers and
    sinks in fp32. On a GPU every output of an fp8 expert has a scale, and sinks are fp32 too.
    """
    parameters, item, experts = model.parameters, scheme.activation_bytes, model.experts
    scales = scheme.output_scale_bytes * model.linear_outputs
    fp32 = model.layers * model.heads if model.sinks else 0
    if device == "cpu":
        head_copy = model.vocabulary_size * model.hidden_size if model.tied_embeddings else 0
        if experts is not None:
            fp32 += len(experts.layers) * experts.count * (model.hidden_size + experts.biases)
        return (parameters + head_copy) * item + fp32 * (4 - item) + scales
    if experts is not None and scheme.fp8_scales == "tensor":
        outputs = 2 * experts.intermediate_size + model.hidden_size
        scales += EXPERT_SCALE_BYTES * len(experts.layers) * experts.count * outputs
    linears = round(model.linear_parameters * (item - scheme.weight_bytes))
    return parameters * item - linears + fp32 * (4 - item) + scales


def screens_head(model: ModelConfig, scheme: LinearScheme, device: str, ranks: int) -> bool:
    """Whether long greedy steps find the highest logits with a copy of the head in e4m3 (``ops.screened_head``)."""
    fits = model.vocabulary_size % 16 == 0 and model.hidden_size % 16 == 0
    return device == "cuda" and scheme.fp8_scales is not None and ranks == 1 and fits


def bytes_per_token(model: ModelConfig, scheme: LinearScheme, device: str) -> int:
    """Cache bytes of one token over all layers."""
    return 2 * model.layers * model.kv_heads * model.head_dim * scheme.cache_item_bytes(device)


def plan_memory_of(
    model: ModelConfig, config: EngineConfig, device: str, available: int, packed_saves: int = 0
) -> MemoryPlan:
    """Derive every size of an engine on a device, "cpu" or "cuda", that has ``available`` bytes left.

    ``packed_saves``: bytes less that weights take which stay packed in four bits.

    Raises:
        ConfigError: a size below 1, or scales that the precision does not have.
        CapacityError: model, context and cache do not fit; the message has the numbers.
    """
    check_sizes(config)
    scheme = scheme_of(config)
    if scheme.stays_packed and (device != "cuda" or config.tensor_parallel > 1 or model.experts is not None):
        raise ConfigError(
            "packed_weights: weights stay packed in fp8 on one GPU that has a whole dense model; leave it on null"
        )
    model = sharded(model, config.tensor_parallel)
    on_gpu = device == "cuda"
    page_size = config.page_size or DEFAULT_PAGE_SIZE
    if on_gpu:
        _check_gpu_shapes(model, page_size)
    max_length = config.max_length or min(model.max_positions, DEFAULT_MAX_LENGTH)
    if max_length > model.max_positions:
        limit = "positions" if model.sliding_window is None else "tokens of the sliding_window"
        raise CapacityError(
            f"max_length {max_length:,} is more than the {model.max_positions:,} {limit} of {model.name}; lower it"
        )
    given_pages = 0
    if config.cache_tokens is not None:
        given_pages = config.cache_tokens // page_size
        if not given_pages:
            raise CapacityError(
                f"cache_tokens {config.cache_tokens} is less than a page of {page_size} tokens; "
                "raise it or lower page_size"
            )
        max_length = min(max_length, given_pages * page_size)
    default_rows = DEFAULT_MAX_BATCHED_TOKENS[device]
    weights = weight_bytes(model, scheme, device) - packed_saves
    if on_gpu and config.tensor_parallel == 1 and model.experts is None:
        if model.parameters > LARGE_MODEL_PARAMETERS:
            default_rows = LARGE_MODEL_TOKENS_ON_GPU
        elif config.throughput_only:
            default_rows = THROUGHPUT_TOKENS_ON_GPU
    if not on_gpu and weights >= HUGE_PAGES_FROM_BYTES:
        default_rows = LARGE_WEIGHTS_TOKENS_ON_CPU
    max_batched_tokens = config.max_batched_tokens or default_rows
    max_sequences = config.max_sequences or (max_batched_tokens * 3 // 4 if on_gpu else DEFAULT_MAX_SEQUENCES_ON_CPU)
    max_sequences = min(max_sequences, max_batched_tokens)  # every running sequence has a token in every step
    page = page_size * bytes_per_token(model, scheme, device)
    window = _own_window(model)
    window_page = page * sum(one is not None for one in model.windows) // model.layers
    # While loading, before the cache is allocated: the largest matrix, its parts, and its fp32 copy. A rank reads the
    # whole embedding and head before it cuts them.
    loading = max(model.vocabulary_size, 2 * model.intermediate_size) * model.hidden_size * (10 if on_gpu else 4)
    process = GPU_LIBRARY_BYTES if on_gpu else PROCESS_BYTES
    if on_gpu and config.tensor_parallel > 1:
        process += GPU_COLLECTIVES_BYTES
    if screens_head(model, scheme, device, config.tensor_parallel):
        process += model.vocabulary_size * (model.hidden_size + 4)
    if on_gpu and config.cuda_graphs:
        rows = graph_tokens(model, scheme, max_batched_tokens)[-1]
        graph_step, _ = _gpu_step_bytes(model, config, page_size, rows, rows + GRAPH_CHUNKS, max_length)
        # Recorded steps share a memory pool, and run outside it first.
        process += model.layers * GRAPH_LAYER_BYTES + 2 * graph_step
    # A whole linear is expanded at a time, in steps and in the memory of recorded ones.
    expanded = max(2 * model.intermediate_size, 2 * model.hidden_size) * model.hidden_size if scheme.stays_packed else 0
    process += 2 * expanded

    if config.memory_bytes is not None:
        available = min(available, config.memory_bytes)
    if not on_gpu:
        available //= config.tensor_parallel
    step_bytes = _gpu_step_bytes if on_gpu else _cpu_step_bytes
    step, step_page = step_bytes(model, config, page_size, max_batched_tokens, max_sequences, max_length)

    wanted_sequences = max_sequences
    if window and on_gpu and config.max_sequences is None and not given_pages:
        most = int(WINDOWS_SHARE * max(0, available - weights - step - process)) // window_page
        max_sequences = min(max_sequences, sequences_of_window_pages(most, window, page_size, max_batched_tokens))

    def cache_bytes(pages: int, window_pages: int) -> int:
        if not window_pages:
            return (pages + 1) * page  # with the dump page
        return (pages + 1) * (page - window_page) + (window_pages + 1) * window_page

    def fitting_pages(window_pages: int) -> int:
        left = available - weights - step - process - cache_bytes(0, window_pages)
        fitting = left // (cache_bytes(1, window_pages) - cache_bytes(0, window_pages) + step_page)
        # Half of a CPU's memory is left to other processes, but one longest sequence always fits.
        sequence_pages, taken = -(-max_length // page_size), fitting if on_gpu else fitting // 2
        return max(min(max_sequences * sequence_pages, taken), min(sequence_pages, fitting), 1)

    window_pages = most_window_pages(window, page_size, max_sequences, max_batched_tokens) if window else 0
    pages = given_pages or fitting_pages(window_pages)
    if window_pages >= pages:  # no layer needs more pages than one that sees all keys
        window = window_pages = 0
        max_sequences = wanted_sequences
        pages = given_pages or fitting_pages(0)
    cache = cache_bytes(pages, window_pages)
    workspace = max(step + pages * step_page, loading - cache)
    plan = MemoryPlan(
        device=device,
        weights_bytes=weights,
        cache_bytes=cache,
        workspace_bytes=workspace,
        process_bytes=process,
        available_bytes=available,
        page_size=page_size,
        pages=pages,
        max_batched_tokens=max_batched_tokens,
        max_sequences=max_sequences,
        max_length=min(max_length, pages * page_size),
        window=window,
        window_pages=window_pages,
        packed_weights=scheme.stays_packed,
    )
    if plan.total_bytes > available:
        limit = "" if config.memory_bytes is None else ", or raise memory_bytes"
        sharing = ", or raise engine.tensor_parallel, with as many GPUs to a node" if device.startswith("cuda") else ""
        kind = "packed weights" if scheme.stays_packed else "weights"
        raise CapacityError(
            f"{model.name} in {config.precision} does not fit: {kind} {_gigabytes(weights)} + "
            f"cache {_gigabytes(plan.cache_bytes)} + workspace {_gigabytes(workspace)} + "
            f"process {_gigabytes(process)} = {_gigabytes(plan.total_bytes)}, "
            f"available {_gigabytes(available)}; take a smaller model, precision, cache_tokens, max_batched_tokens or "
            f"max_length{limit}{sharing}"
        )
    if config.max_length is not None and plan.max_length < config.max_length:
        raise CapacityError(
            f"max_length {config.max_length:,} does not fit into the cache of {plan.cache_tokens:,} tokens; "
            "lower it, or raise cache_tokens or memory_bytes"
        )
    return plan


def _own_window(model: ModelConfig) -> int:
    """Keys of the largest window, if layers with windows may have pages of their own; 0 if not."""
    windows = [window for window in model.windows if window is not None]
    return 0 if len(windows) == model.layers else max(windows, default=0)


def graph_tokens(model: ModelConfig, scheme: LinearScheme, max_batched_tokens: int) -> tuple[int, ...]:
    """The sizes in ``GRAPH_TOKENS`` that steps are padded and recorded to. ``model``: a rank's part."""
    most = min(max_batched_tokens, most_recorded_tokens(model, scheme))
    return GRAPH_TOKENS[: bisect_left(GRAPH_TOKENS, most) + 1]


def most_tokens(model: ModelConfig, scheme: LinearScheme, max_batched_tokens: int) -> int:
    """Rows of the largest tensor of a step, with what recorded steps add. ``model``: a rank's part."""
    return max(max_batched_tokens, graph_tokens(model, scheme, max_batched_tokens)[-1] + GRAPH_CHUNKS)


def most_recorded_tokens(model: ModelConfig, scheme: LinearScheme) -> float:
    """Tokens of a step that takes a GPU as long as its launches take the host. ``model``: a rank's part."""
    launch_seconds = LAUNCH_SECONDS_PER_LAYER * model.layers
    token_seconds = 2 * model.active_linear_parameters / scheme.product_operations_per_second
    return min(GRAPH_TOKENS[-1], launch_seconds / token_seconds)


def records_step(chunks: int, tokens: float, most_tokens: float) -> bool:
    """Whether a step is recorded as a CUDA graph: it is short, and has few prompts."""
    return chunks <= GRAPH_CHUNKS and tokens <= most_tokens


def gathers_contexts(group: int, chunks: int, longest_chunk: int, longest_context: int) -> bool:
    """Whether a step's prompt attention gathers keys and values on a GPU that can (``ops.prompt_attention``).

    Gathering takes no more memory than the partial results of decode attention, which are freed before.

    ``group``: query heads of a key head. ``longest_context``: most keys that a chunk's last token sees.
    """
    fits = chunks * gathered_tokens(longest_context) <= PARTIAL_RESULTS * group
    return fits and longest_context > PAGED_CONTEXT and longest_chunk * group >= GATHERED_QUERIES


def gathered_tokens(longest_context: int) -> int:
    """Room for each gathered context: whole tiles of 128 keys, a multiple of every tile that a launch may take."""
    return -(-longest_context // 128) * 128


def _cpu_step_bytes(
    model: ModelConfig,
    config: EngineConfig,
    page_size: int,
    max_batched_tokens: int,
    max_sequences: int,
    max_length: int,
) -> tuple[int, int]:
    """Most memory of the tensors of one step: fixed bytes, and bytes for each page of the cache."""
    scheme = scheme_of(config)
    item = scheme.activation_bytes
    heads, queries, keys = model.heads, model.heads * model.head_dim, model.kv_heads * model.head_dim
    sampled = min(max_sequences, max_batched_tokens)
    token = item * (4 * model.hidden_size + 3 * (queries + 2 * keys) + 2 * model.intermediate_size)
    token += scheme.cpu_input_bytes * (model.hidden_size + model.intermediate_size)
    experts = 0
    if (mixture := model.experts) is not None:
        # Inputs, outputs and what is between them of every choice, padded for each expert; their sum in fp32.
        hidden, width, choices = model.hidden_size, mixture.intermediate_size, mixture.active * max_batched_tokens
        row = item * (2 * hidden + 2 * width) + scheme.cpu_input_bytes * max(hidden, width)
        experts = (choices + MOST_PADDING * min(mixture.count, choices)) * row + choices * hidden * (item + 8)
        experts += max_batched_tokens * (4 * hidden + 12 * mixture.count)
    logits = sampled * _logit_elements(model) * item + BLOCK_SAMPLES * model.vocabulary_size * 96
    if model.sinks:  # scores three times, and keys and values for every head, in fp32
        queries_at_once = min(WINDOWED_QUERIES_ON_CPU, max_batched_tokens)
        logits = max(logits, 4 * max_length * heads * (3 * queries_at_once + 2 * model.head_dim))
    # A later chunk of a prompt: the sequence's keys and values gathered, and the mask.
    chunk = max_length * (4 * keys * item + max_batched_tokens * 5)
    # Decode: scores and weights by sequence, queries and partial sums by page, and copied pages.
    sequence_page = item * (2 * heads * page_size + queries) + 4 * heads
    by_sequence = sampled * -(-max_length // page_size) * sequence_page
    rotary = 2 * max_length * model.head_dim * item
    by_page = item * (2 * heads * page_size + 2 * queries + 2 * keys * page_size) + 4 * heads
    return max_batched_tokens * token + max(logits, experts) + max(chunk, by_sequence) + rotary, by_page


def _gpu_step_bytes(
    model: ModelConfig,
    config: EngineConfig,
    page_size: int,
    max_batched_tokens: int,
    max_sequences: int,
    max_length: int,
) -> tuple[int, int]:
    """The same on a GPU, where nothing grows with the pages of the cache and two steps are in flight."""
    hidden, feed_forward = model.hidden_size, model.intermediate_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sampled = max_sequences
    token = 2 * (4 * hidden + 2 * (queries + 2 * keys) + 2 * queries + 3 * feed_forward)
    token += scheme_of(config).gpu_input_bytes * max(feed_forward, queries, hidden)
    if (mixture := model.experts) is not None:
        # Of every choice gate and up, their product, the output and its place; scores, weights and e4m3 of the token.
        token += mixture.active * (2 * (3 * mixture.intermediate_size + hidden) + 64) + 12 * mixture.count + hidden
    logits = sampled * _logit_elements(model) * 2 + BLOCK_SAMPLES * model.vocabulary_size * 96
    partial = max(PARTIAL_RESULTS, sampled) * model.heads * (model.head_dim + 2) * 4
    tables = 2 if _own_window(model) else 1
    indices = 2 * 4 * (2 * tables * sampled * -(-max_length // page_size) + 8 * max_batched_tokens)
    rotary = 2 * max_length * model.head_dim * 2
    return max_batched_tokens * token + logits + partial + indices + rotary, 0


def _logit_elements(model: ModelConfig) -> int:
    """Logits of one token; if ranks share the head, also this rank's and all ranks' before they are reordered."""
    vocabulary, ranks = model.vocabulary_size, model.vocabulary_ranks
    return vocabulary if ranks == 1 else 2 * vocabulary + vocabulary // ranks


def _check_gpu_shapes(model: ModelConfig, page_size: int) -> None:
    """Refuse shapes that the attention kernels do not support."""
    if page_size not in GPU_PAGE_SIZES:
        raise CapacityError(
            f"page_size {page_size}: on a GPU it must be one of {', '.join(map(str, GPU_PAGE_SIZES))}; "
            f"take {DEFAULT_PAGE_SIZE}"
        )
    group = model.heads // model.kv_heads
    if model.head_dim % 16 or model.head_dim > 256 or group > 16:
        raise CapacityError(
            f"{model.name} has heads of {model.head_dim} and {group} queries a key head; the GPU back end takes heads "
            "of 16, 32, ... 256 and up to 16 queries; run it with engine.device cpu"
        )


def check_sizes(config: EngineConfig) -> None:
    """Refuse a size below 1."""
    for name in (
        *("max_batched_tokens", "max_sequences", "max_length", "page_size", "cache_tokens", "memory_bytes", "threads"),
        "tensor_parallel",
    ):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f} GB"
