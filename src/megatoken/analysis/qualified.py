"""A machine as ``megatoken qualify`` measured it: what a model would serve on it, from the parts of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.engine.config import SHAPES, EngineConfig, ModelConfig
from megatoken.engine.cost_model import CostModel, Costs, StepCost
from megatoken.engine.gpus import Gpu, find_gpu, gpus
from megatoken.engine.measured_costs import CorrectedCosts, Factors, ProcessorCosts, ProcessorRates
from megatoken.engine.memory import MemoryPlan, plan_memory_of
from megatoken.engine.schemes import LinearScheme, scheme_of
from megatoken.engine.simulated import CONTEXT_BYTES
from megatoken.errors import MegatokenError, UsageError
from megatoken.files import mapping
from megatoken.hardware.qualify.document import read_document
from megatoken.hardware.qualify.judge import MOST_NAMED, Verdict, waited
from megatoken.hardware.qualify.shapes import (
    CPU_LOAD,
    CPU_TOKENS,
    GPU_ATTENTION,
    GPU_LAYERS,
    SMALL_LOAD,
    WARM_UP_STEPS,
    Load,
    fastest_products,
    products_of,
)
from megatoken.text import count_of, precise

if TYPE_CHECKING:
    import pyarrow as pa

PARTS = StepCost._fields[1:9]
AGREEING_SHARE = 0.15
"""Of a predicted rate, by which a measured one may differ: so near are predictions on a machine without other work."""
LAYERS = "layer_products_"
"""How the names of these values begin; the format follows."""
KERNELS = ("decode_attention", "prompt_attention", "rms_norm")
"""Those of a processor."""
TOKEN_STEP = f"mixed_step{SMALL_LOAD.suffix}"
"""Shows what a token takes beyond its kernels. Documents of earlier versions lack it: there a token takes nothing."""
COPY_SHARE = 0.89
"""Of the data sheet's bandwidth, that a copy reached on the H200 from which the cost model's constants are."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One document of ``megatoken qualify``."""

    source: str  # the file
    name: str  # the part: a GPU of gpu_specs.csv, or a processor
    values: Mapping[str, float]  # medians by name
    counts: Mapping[str, int]  # windows of each value
    memory_bytes: int  # that were available
    noisy: Mapping[str, float]  # noisy values by name, with the share of their time for which they waited for a core
    doubts: tuple[str, ...]  # what is wrong with the whole document, in sentences

    @property
    def gpu(self) -> Gpu | None:
        """The data sheet; None of a processor."""
        return gpus().get(self.name)

    @property
    def precisions(self) -> list[str]:
        """Formats in which the products of layers were measured; on a processor the engine runs in the only one."""
        names = (name.removeprefix(LAYERS).split("_")[0] for name in self.values if name.startswith(LAYERS))
        return list(dict.fromkeys(names))

    def most_operations_per_second(self, precision: str) -> float | None:
        """Of the largest products on all cores or the GPU; None if they were not measured in this format."""
        unit = 1e9 if self.gpu is None else 1e12
        rate = fastest_products(self.values, precision)
        return None if rate is None else unit * rate

    @property
    def read_bytes_per_second(self) -> float | None:
        """Of memory."""
        read = self.values.get("memory_read" if self.gpu is None else "hbm_read")
        return None if read is None else read * 1e9

    def memory(self, model: ModelConfig, config: EngineConfig) -> MemoryPlan:
        """The engine's memory plan on this machine. Raises as ``plan_memory_of``."""
        device = "cpu" if self.gpu is None else "cuda"
        return plan_memory_of(model, config, device, self.memory_bytes)

    def costs(self, model: ModelConfig, config: EngineConfig) -> Costs:
        """What the steps of a model take.

        Raises:
            UsageError: the document lacks a value that this needs; of a GPU, all products of layers in this format.
            ConfigError: the GPU has no such products.
        """
        scheme = scheme_of(config)
        if self.gpu is None:
            return ProcessorCosts(model, scheme, self.processor_rates(scheme, model.layers))
        return self._corrected(CostModel(model, scheme, self.gpu, cuda_graphs=config.cuda_graphs), scheme, self.gpu)

    def value_names(self, scheme: LinearScheme) -> list[str]:
        """The values from which the costs of steps follow; a GPU may lack some, a processor ``TOKEN_STEP``."""
        products = f"{LAYERS}{scheme.precision}_"
        if self.gpu is not None:
            names = [f"{products}{shape}_{tokens}" for shape in GPU_LAYERS.shapes for tokens in GPU_LAYERS.tokens]
            return [*names, *(["decode_attention"] if scheme.fp8_cache else []), "hbm_copy"]
        steps = [f"decode_step{load.suffix}" for load in (SMALL_LOAD, CPU_LOAD)]
        return [*(f"{products}{tokens}" for tokens in CPU_TOKENS), *KERNELS, *steps, TOKEN_STEP]

    def warnings(self, config: EngineConfig) -> Iterator[str]:
        """Why a rate that is predicted from this document may be wrong."""
        yield from self.doubts
        used = [name for name in self.value_names(scheme_of(config)) if name in self.values]
        noisy = [self.noisy[name] for name in used if name in self.noisy]
        if noisy:
            waits = list(filter(waited, noisy))
            cause = f", and {len(waits)} waited for a core, up to {max(waits):.0%} of their time" if waits else ""
            are = "is" if len(noisy) == 1 else "are"
            yield (
                f"{self.source}: {len(noisy)} of the {len(used)} values that the plan uses {are} noisy{cause}; "
                "stop other work and repeat megatoken qualify."
            )

    def processor_rates(self, scheme: LinearScheme, layers: int) -> ProcessorRates:
        """The kernels of a processor, and what steps of two models took beyond them, for a model of so many layers."""
        if missing := [name for name in self.value_names(scheme) if name not in self.values and name != TOKEN_STEP]:
            raise self._lacking(missing, scheme.precision)
        precision, shape = scheme.precision, SHAPES[CPU_LOAD.shape]
        item = scheme.activation_bytes
        points = []
        for tokens in CPU_TOKENS:
            rate = self.values[f"{LAYERS}{precision}_{tokens}"] * 1e9
            if tokens == 1:  # in bytes/s
                products = products_of(shape)
                rate *= sum(one.operations(1) for one in products) / sum(one.moved_bytes(1, item) for one in products)
            points.append((float(tokens), rate))
        attention, prompts, norm = (self.values[name] * 1e9 for name in KERNELS)
        rates = ProcessorRates(points, attention, prompts, norm)

        def beyond(load: Load, *chunks: tuple[int, int]) -> float:
            """Seconds of a measured step that ``rates`` do not explain: of decodes, or of these and a prompt."""
            decodes, mixed = f"decode_step{load.suffix}", f"mixed_step{load.suffix}"
            name, before = (mixed, self.counts[decodes]) if chunks else (decodes, 0)
            keys = load.sequences * (load.prompt_tokens + WARM_UP_STEPS + before + self.counts[name] / 2)
            costs = ProcessorCosts(SHAPES[load.shape], scheme, rates)
            known = costs.step_of(load.sequences, keys, chunks, load.sequences + len(chunks))
            return self.values[name] / 1e3 - known.seconds

        if TOKEN_STEP in self.values:
            tokens = SMALL_LOAD.prompt_tokens
            of_prompt = beyond(SMALL_LOAD, (0, tokens)) - beyond(SMALL_LOAD)
            rates = replace(rates, token_seconds=max(0.0, of_prompt / tokens))
        few, many = (SHAPES[load.shape].layers for load in (SMALL_LOAD, CPU_LOAD))
        least, most = (max(0.0, beyond(load)) for load in (SMALL_LOAD, CPU_LOAD))
        layer = max(0.0, (most - least) / (many - few))
        step = least - few * layer
        if step < 0:  # the measured kernels do not explain both: the model whose size is nearer decides
            layer, step = (least / few if layers - few < many - layers else most / many), 0.0
        return replace(rates, step_seconds=step, layer_seconds=layer)

    def _corrected(self, model: CostModel, scheme: LinearScheme, gpu: Gpu) -> CorrectedCosts:
        """Corrections of what the document has; the other parts that it lacks stay as the cost model has them."""
        few, many = min(GPU_LAYERS.tokens), max(GPU_LAYERS.tokens)

        def products(tokens: int) -> float | None:
            found = []
            for name in GPU_LAYERS.shapes:
                measured = self.values.get(f"{LAYERS}{scheme.precision}_{name}_{tokens}")
                if measured is not None:
                    shape = SHAPES[name]
                    cost = CostModel(shape, scheme, gpu).step_of(tokens, 0, (), tokens)
                    found.append(2e-12 * tokens * shape.linear_parameters / cost.products / measured)
            return math.prod(found) ** (1 / len(found)) if found else None

        at_many, at_few = products(many), products(few)
        if at_many is None and at_few is None:  # the rate would be that of the cost model, as --gpu gives it
            raise self._lacking([LAYERS], scheme.precision)
        attention, copy = self.values.get("decode_attention"), self.values.get("hbm_copy")
        decode = elementwise = None
        if attention is not None and scheme.fp8_cache:
            shape, of = SHAPES[GPU_ATTENTION.shape], GPU_ATTENTION
            keys = of.sequences * of.prompt_tokens
            cost = CostModel(shape, scheme, gpu).step_of(of.sequences, keys, (), 0)
            moved = 2.0 * shape.layers * shape.kv_heads * shape.head_dim * keys
            decode = moved / 1e9 / cost.decode_attention / attention
        if copy is not None:
            elementwise = COPY_SHARE * gpu.memory_bytes_per_second / 1e9 / copy
        return CorrectedCosts(model, Factors(at_many, at_few, decode, elementwise), few, many)

    def _lacking(self, names: Iterable[str], precision: str) -> UsageError:
        """The error for values of these names, which the document lacks and a prediction needs."""
        if self.precisions and precision not in self.precisions:
            why, fix = f"no products of layers in {precision} were measured", f"give --precision {self.precisions[0]}"
        else:
            tests = list(dict.fromkeys(map(_test_of, names)))
            why = (
                f"lacks values of the test{'s' if len(tests) > 1 else ''} {', '.join(tests)}, which a prediction needs"
            )
            fix = "run all tests of megatoken qualify to the end"
        if self.gpu is not None:
            fix += f", or give --gpu {self.name} instead of --machine for the cost model alone"
        return UsageError(f"{self.source}: {why}; {fix}")


def _test_of(name: str) -> str:
    """The test of ``megatoken qualify`` that measures a value of ``Machine.value_names``."""
    if name.startswith(LAYERS):
        return "layers"
    return "kernels" if name in KERNELS else "steps"


def read_machine(path: Path) -> Machine:
    """The machine of a ``qualify.json``. Raises UsageError: it cannot be read, or is another document."""
    return machine_of(read_document(path, "--machine"), str(path))


def measured_values(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The values of a qualification that were measured, by name."""
    values = (value for test in document["tests"] for value in test["values"])
    return {value["name"]: value for value in values if value.get("median") is not None}


def machine_of(document: Mapping[str, Any], source: str) -> Machine:
    """The same of a document that was read and checked, see ``check_document``."""
    values = measured_values(document)
    name = str(document["device"])
    memory = (document["machine"].get("memory") or {}).get("available_bytes") or 0
    if name in gpus():
        memory = find_gpu(name).memory_bytes - CONTEXT_BYTES
    return Machine(
        source,
        name,
        {name: float(value["median"]) for name, value in values.items() if value["median"] > 0},
        {name: len(value["windows"]) for name, value in values.items()},
        memory,
        {name: value.get("core_wait_share") or 0.0 for name, value in values.items() if value.get("noisy") is True},
        tuple(_doubts(document, source)),
    )


def _doubts(document: Mapping[str, Any], source: str) -> Iterator[str]:
    tests = document["tests"]
    if document.get("complete") is False:
        yield f"{source}: the qualification did not end; repeat megatoken qualify."
    if document["verdict"] == Verdict.FAIL:
        failed = [str(test.get("title")) for test in tests if test["verdict"] == Verdict.FAIL]
        more = f" and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
        yield (
            f"{source}: the verdict is FAIL ({'; '.join(failed[:MOST_NAMED])}{more}), so the machine may be slow or "
            f"faulty; megatoken report {source} says why."
        )
    parts = mapping(document.get("parts"))
    if isinstance(names := parts.get("names"), list) and len(names) > 1:
        first = next((value["part"] for test in tests for value in test["values"] if value.get("part")), names[0])
        yield f"{source}: the plan uses the values of {first} alone, of {count_of(len(names), str(parts.get('kind')))}."


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a machine should reach in Offline, by its qualification; ``part_seconds`` of all steps, by part."""

    output_tokens_per_second: float
    seconds: float
    steps: int
    part_seconds: Mapping[str, float]


def predict(
    costs: Costs, memory: MemoryPlan, lengths: Sequence[tuple[int, int]], *, prefix_cache: bool = False
) -> Prediction:
    """Plan and time every step for requests of ``lengths``, prompt and answer tokens, that all wait from the start."""
    scheduler = memory.scheduler(prefix_cache=prefix_cache)
    for number, (prompt, answer) in enumerate(lengths):
        scheduler.add(number, prompt, answer)
    seconds, steps, parts = 0.0, 0, dict.fromkeys(PARTS, 0.0)
    while (plan := scheduler.plan()) is not None:
        cost = costs.step(plan)
        seconds, steps = seconds + cost.seconds, steps + 1
        for name in PARTS:
            parts[name] += getattr(cost, name)
    tokens = sum(answer for _, answer in lengths)
    return Prediction(tokens / seconds if seconds else math.nan, seconds, steps, parts)


def predict_run(
    machine: Machine, result: Mapping[str, Any], settings: Mapping[str, Any], requests: pa.Table
) -> Prediction | str:
    """What the machine should have reached with the requests of a run; otherwise why that is unknown.

    ``settings``: of ``config.yaml``; ``requests``: table of ``SampleRow``.
    """
    engine = settings.get("engine") or {}
    shape = SHAPES.get(str(result.get("model")))
    if result.get("scenario") != "offline" or "soak" in result:
        return "only an Offline rate follows from a machine; other scenarios offer their own"
    if shape is None:
        return f"it predicts named shapes only, such as --model 125m, and {result.get('model')} is not one"
    if result.get("rack_nodes") or result.get("client") or (result.get("target") or {}).get("simulated_gpu"):
        return "the run did not use the engine of this machine alone"
    names = {one.name for one in fields(EngineConfig)}
    known = {name: value for name, value in engine.items() if name in names}
    config = EngineConfig(precision=result["precision"], **known)
    table = requests.sort_by("sample_id")
    lengths = list(zip(table["input_tokens"].to_pylist(), table["output_tokens"].to_pylist(), strict=True))
    if not lengths or not all(prompt and answer for prompt, answer in lengths):
        return "the lengths of prompts and answers are not known"
    try:
        costs, memory = machine.costs(shape, config), machine.memory(shape, config)
    except MegatokenError as error:
        return str(error)
    return predict(costs, memory, lengths, prefix_cache=config.prefix_cache)


def agreement(rate: float, predicted: float) -> str:
    """Whether a measured rate agrees with the one that a qualification predicts, and what it means if not; tokens/s."""
    share = rate / predicted
    compared = f"{precise(rate)} tokens/s are {share:.0%} of the {precise(predicted)} that qualify predicts"
    if abs(share - 1) <= AGREEING_SHARE:
        return f"{compared}: they agree within {AGREEING_SHARE:.0%}"
    if share < 1:
        return f"{compared}: something slowed the run down, and megatoken doctor RUN says what"
    return f"{compared}: other work slowed the qualification down, so repeat it, or the rate is not true"
