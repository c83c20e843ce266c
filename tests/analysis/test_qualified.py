"""What a qualified machine should serve: the parts of steps, added up, against numbers computed by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_support import call_here
from megatoken.analysis.qualified import agreement, machine_of, predict
from megatoken.engine.config import SHAPES, EngineConfig
from megatoken.engine.cost_model import CostModel
from megatoken.engine.gpus import find_gpu
from megatoken.engine.measured_costs import ModelWork, ProcessorCosts, ProcessorRates
from megatoken.engine.schemes import find_scheme
from megatoken.errors import UsageError
from megatoken.hardware.qualify.document import check_document
from megatoken.planning.rack_simulation import Rack

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FP32, FP8 = find_scheme("fp32"), find_scheme("fp8")
CPU_VALUES = {
    "layer_products_fp32_1": 10.0,
    "layer_products_fp32_16": 40.0,
    "layer_products_fp32_64": 60.0,
    "layer_products_fp32_256": 80.0,
    "decode_attention": 5.0,
    "prompt_attention": 20.0,
    "rms_norm": 10.0,
    "decode_step_tiny": 50.0,
    "decode_step": 160.0,
}


def document(device: str, values: dict[str, float]) -> dict[str, Any]:
    common = {"verdict": "NO REFERENCE"}
    measured = [common | {"name": name, "median": one, "windows": [one] * 3} for name, one in values.items()]
    return {
        "kind": "qualify",
        "schema_version": 1,
        "device": device,
        "machine": {"memory": {"available_bytes": 8 * 2**30}},
        "verdict": "NO REFERENCE",
        "tests": [{"verdict": "NO REFERENCE", "values": measured}],
    }


def test_a_step_is_the_sum_of_its_parts() -> None:
    rates = ProcessorRates([(1.0, 1e9), (100.0, 100e9)], 4e9, 2e9, 8e9, 1e-3, 1e-4)
    model = SHAPES["tiny"]
    cost = ProcessorCosts(model, FP32, rates).step_of(9, 900, [(0, 1)], 10)
    parameters = 6 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 896)
    assert model.linear_parameters == parameters
    assert cost.products == pytest.approx(10 * 2 * parameters / 10e9)  # 10 tokens: halfway on logarithmic axes
    assert cost.head == pytest.approx(10 * 2 * 256 * 8192 / 10e9)
    assert cost.decode_attention == pytest.approx(900 * 2 * 6 * 128 * 4 / 4e9)
    assert cost.chunk_attention == pytest.approx(4 * 6 * 256 / 2e9)
    assert (cost.gaps, cost.stack) == pytest.approx((6e-4, 1e-3))
    assert cost.seconds == pytest.approx(sum(cost[1:9]))


def test_time_beyond_the_kernels_is_found_from_two_models() -> None:
    machine = machine_of(document("A processor, 2 cores", CPU_VALUES), "qualify.json")
    rates = machine.processor_rates(FP32, 12)
    for name, suffix in (("tiny", "_tiny"), ("125m", "")):
        cost = ProcessorCosts(SHAPES[name], FP32, rates).step_of(16, 16 * (128 + 3 + 1.5), (), 16)
        assert cost.seconds == pytest.approx(CPU_VALUES[f"decode_step{suffix}"] / 1e3)
    assert rates.token_seconds == 0  # documents of earlier versions lack the step with a prompt
    with pytest.raises(UsageError, match=r"no products of layers in bf16 were measured; give --precision fp32"):
        machine.processor_rates(find_scheme("bf16"), 12)


def test_a_step_with_a_prompt_shows_what_a_token_takes_beyond_its_kernels() -> None:
    values = CPU_VALUES | {"mixed_step_tiny": 100.0}
    rates = machine_of(document("A processor, 2 cores", values), "qualify.json").processor_rates(FP32, 12)
    assert rates.token_seconds > 0
    tiny, m125 = (ProcessorCosts(SHAPES[name], FP32, rates) for name in ("tiny", "125m"))
    for costs, steps, chunks, measured in (
        (tiny, 3 + 1.5, [], 50.0),
        (tiny, 3 + 3 + 1.5, [(0, 128)], 100.0),
        (m125, 3 + 1.5, [], 160.0),
    ):
        cost = costs.step_of(16, 16 * (128 + steps), chunks, 16 + len(chunks))
        assert cost.seconds == pytest.approx(measured / 1e3)
    faster = machine_of(document("A processor, 2 cores", values | {"mixed_step_tiny": 51.0}), "qualify.json")
    assert faster.processor_rates(FP32, 12).token_seconds == 0  # other work slowed the kernels down


def test_where_both_models_do_not_fit_one_line_the_nearer_one_decides() -> None:
    """Other work slowed the steps of the larger one: those of the smaller one stay what they were measured to be."""
    values = CPU_VALUES | {"decode_step": 2000.0}
    machine = machine_of(document("A processor, 2 cores", values), "qualify.json")
    for name, measured in (("tiny", CPU_VALUES["decode_step_tiny"]), ("125m", 2000.0)):
        costs = machine.costs(SHAPES[name], EngineConfig(precision="fp32"))
        cost = costs.step_of(16, 16 * (128 + 3 + 1.5), (), 16)
        assert cost.seconds == pytest.approx(measured / 1e3)


def test_a_prediction_plans_every_token_once() -> None:
    machine = machine_of(document("A processor, 2 cores", CPU_VALUES), "qualify.json")
    config = EngineConfig(precision="fp32", max_sequences=4, max_length=64, max_batched_tokens=32)
    model = SHAPES["tiny"]
    found = predict(machine.costs(model, config), machine.memory(model, config), [(20, 5)] * 7)
    assert found.output_tokens_per_second == pytest.approx(35 / found.seconds)
    assert found.output_tokens_per_second == pytest.approx(62.141052801)  # as in earlier versions
    assert found.steps >= 2 * 4 + 3
    assert sum(found.part_seconds.values()) == pytest.approx(found.seconds)


def test_a_gpu_as_fast_as_the_model_is_left_alone_and_a_slower_part_is_slower() -> None:
    gpu, model = find_gpu("H200"), SHAPES["llama2-70b"]
    own = CostModel(model, FP8, gpu)
    values = {
        f"layer_products_fp8_{name}_{tokens}": 2e-12
        * tokens
        * SHAPES[name].linear_parameters
        / CostModel(SHAPES[name], FP8, gpu).step_of(tokens, 0, (), tokens).products
        for name in ("llama2-70b", "llama3.1-8b")
        for tokens in (64, 1536)
    }
    work = ModelWork.of(model, FP8, "cuda")
    keys = 900 * 512
    values["decode_attention"] = keys * work.cached_token_bytes / own.step_of(900, keys, (), 0).decode_attention / 1e9
    values["hbm_copy"] = 0.89 * 4800
    config = EngineConfig(precision="fp8")
    work_of_step = (500, 500 * 400, [(0, 256)], 501)
    alone = own.step_of(*work_of_step)
    same = machine_of(document("H200", values), "x").costs(model, config).step_of(*work_of_step)
    assert same.seconds == pytest.approx(alone.seconds)
    values["decode_attention"] /= 2
    slower = machine_of(document("H200", values), "x").costs(model, config).step_of(*work_of_step)
    assert slower.seconds == pytest.approx(alone.seconds + alone.decode_attention)


def test_the_command_predicts_and_refuses_two_machines(tmp_path: Path) -> None:
    file = tmp_path / "qualify.json"
    file.write_text(json.dumps(document("A processor, 2 cores", CPU_VALUES)))
    arguments = ("plan", "throughput", "--machine", file, "--model", "tiny", "--minutes", 0.02)
    code, out, err = call_here(*arguments, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["title"] == "tiny in fp32 on A processor, 2 cores, predicted from its qualification"
    names = [one["name"] for one in plan["inputs"]]
    assert "products of 1 token" in names and "software" not in names
    assert Rack.of("tiny", EngineConfig(), "x", nodes=1, gpus_per_node=1).machine is None
    for more, words in (
        (("--gpu", "H200"), "give one of them"),
        (("--gpus-per-node", 8), "--gpus-per-node 8: "),
        (("--gpus-per-node", 8), "is of a processor, A processor, 2 cores, and the engine uses all of it once; leave"),
        (("--precision", "bf16"), "no products of layers in bf16 were measured; give --precision fp32"),
        (("--software", "published"), "--software published: a prediction from "),
    ):
        code, _, err = call_here(*arguments, *more)
        assert code == 2
        assert words in err


LAYERS_OF_GPU = {f"layer_products_fp8_llama3.1-8b_{tokens}": 700.0 for tokens in (64, 1536)}


def planned(tmp_path: Path, document: dict[str, Any], *more: str) -> tuple[dict[str, Any], str]:
    """The plan of a qualification, or the one line that refuses it."""
    file = tmp_path / "qualify.json"
    file.write_text(json.dumps(document))
    code, out, err = call_here("plan", "throughput", "--machine", file, "--minutes", 0.02, "--json", *more)
    assert (code, len(err.splitlines())) == ((0, 0) if out else (2, 1))
    return json.loads(out or "{}"), err


def test_a_part_that_was_not_measured_on_a_gpu_is_an_estimate_by_the_model(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, document("H200", LAYERS_OF_GPU | {"hbm_copy": 4000.0}), "--model", "llama3.1-8b")
    factors = {one["name"].partition(",")[0]: one for one in plan["inputs"] if "against the model" in one["name"]}
    assert {name: one["state"] for name, one in factors.items()} == {
        "products": "measured",
        "weights": "measured",
        "elementwise": "measured",
        "decode attention": "estimate",
        "chunk attention": "estimate",
    }
    for name in ("decode attention", "chunk attention"):
        assert (factors[name]["value"], factors[name]["source"]) == (1.0, "not measured; as in the cost model")


def test_a_gpu_without_products_in_the_format_is_not_predicted(tmp_path: Path) -> None:
    """The rate would be that of the cost model, called one of this GPU."""
    model = ("--model", "llama3.1-8b")
    _, err = planned(tmp_path, document("H200", LAYERS_OF_GPU), *model, "--precision", "bf16")
    assert "no products of layers in bf16 were measured; give --precision fp8, or give --gpu H200" in err
    _, err = planned(tmp_path, document("H200", {"hbm_copy": 4000.0}), *model)
    assert "lacks values of the test layers, which a prediction needs; run all tests of megatoken qualify" in err
    assert "or give --gpu H200 instead of --machine" in err


@pytest.mark.parametrize(
    ("kept", "tests"),
    [
        ((), "tests layers, kernels, steps"),
        (["layer_products_fp32_1", "layer_products_fp32_16"], "tests layers, kernels, steps"),
        ([name for name in CPU_VALUES if name != "decode_step"], "test steps"),
    ],
)
def test_a_file_without_the_tests_that_a_prediction_needs_names_them(
    kept: Sequence[str], tests: str, tmp_path: Path
) -> None:
    some = document("A processor, 2 cores", {"core_clock": 3.0} | {name: CPU_VALUES[name] for name in kept})
    _, err = planned(tmp_path, some, "--model", "tiny")
    needs = "which a prediction needs; run all tests of megatoken qualify to the end"
    assert err.endswith(f"qualify.json: lacks values of the {tests}, {needs}\n")


def test_a_plan_says_what_is_wrong_with_the_values_that_it_uses(tmp_path: Path) -> None:
    sound = document("A processor, 2 cores", CPU_VALUES | {"memory_read": 20.0})
    by_itself, _ = planned(tmp_path, sound)
    assert by_itself["title"].startswith("125m in fp32 on A processor, 2 cores")
    plan, _ = planned(tmp_path, sound, "--model", "tiny")
    assert not any("qualify.json" in note for note in plan["notes"])
    measured = {value["name"]: value for value in sound["tests"][0]["values"]}
    for name, wait in (("memory_read", 0.5), ("rms_norm", 0.0), ("decode_step", 0.27), ("decode_step_tiny", None)):
        measured[name] |= {"noisy": True, "core_wait_share": wait}
    measured["memory_read"]["verdict"] = "FAIL"
    measured["rms_norm"]["part"] = "node alpha"
    sound["tests"][0] |= {"verdict": "FAIL", "title": "Memory, node alpha"}
    parts = {"kind": "node", "names": ["alpha", "beta"], "first": "alpha"}
    plan, _ = planned(tmp_path, sound | {"verdict": "FAIL", "complete": False, "parts": parts}, "--model", "tiny")
    of_file = [note.partition("qualify.json: ")[2] for note in plan["notes"] if "qualify.json: " in note]
    assert of_file[0] == "the qualification did not end; repeat megatoken qualify."
    assert of_file[1].startswith("the verdict is FAIL (Memory, node alpha), so the machine may be slow or faulty; ")
    assert of_file[2] == "the plan uses the values of node alpha alone, of 2 nodes."
    assert of_file[3] == (
        "3 of the 9 values that the plan uses are noisy, and 1 waited for a core, up to 27% of their time; "
        "stop other work and repeat megatoken qualify."
    )


VALUE = {"name": "rms_norm", "title": "RMS norm", "unit": "GB/s", "better": "higher", "spread": 0.0, "verdict": "PASS"}
VALUE |= {"drift": 0.0, "noisy": False, "band": {"lowest": 1.0, "highest": 3.0, "sources": []}}
TEST = {"name": "kernels", "title": "Kernels", "verdict": "PASS", "runs": 1}


@pytest.mark.parametrize("command", ["plan throughput --machine", "qualify --compare azure --of", "report", "baseline"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"tests": None}, "tests is not a list"),
        ({"tests": {}}, "tests is not a list"),
        ({"tests": [{}]}, "tests[0]: values is not a list"),
        ({"machine": None}, "machine is not an object"),
        ({"value": {"median": "9"}}, "tests[0]: values[0]: median is not a number"),
        ({"value": {"core_wait_share": "x"}}, "tests[0]: values[0]: core_wait_share is not a number"),
        ({"value": {"median": -1.0}}, "tests[0]: values[0]: median is -1.0, which no speed is"),
        ({"value": {"median": 0}}, "tests[0]: values[0]: median is 0, which no speed is"),
        ({"value": {"windows": None}}, "tests[0]: values[0]: windows is not a list"),
        ({"value": {"verdict": "FINE"}}, "tests[0]: values[0]: verdict is none of NO REFERENCE, PASS, "),
        ({"value": {"verdict": "FAIL"}}, "tests[0]: verdict is 'PASS', but its values give FAIL"),
        ({"value": {"verdict": "NOT RUN", "name": "kernels"}}, "verdict is 'PASS', but its values give NOT RUN"),
        ({"test": {"fault": "it crashed"}}, "tests[0]: verdict is 'PASS', but its values give FAIL"),
        ({"test": {"verdict": None}}, "tests[0]: verdict is None, but its values give PASS"),
        ({"value": {"median": 3.0}}, "tests[0]: values[0]: median is 3.0, but that of its windows is 2.0"),
        ({"value": {"windows": []}}, "tests[0]: values[0]: median is 2.0, but that of its windows is None"),
        ({"value": {"spread": 0.01}}, "tests[0]: values[0]: spread is 0.01, but that of its windows is 0.0"),
        ({"value": {"drift": 0.01}}, "tests[0]: values[0]: drift is 0.01, but that of its windows is 0.0"),
        ({"value": {"core_wait_share": 0.4}}, "noisy is False, but its windows or its waits for cores are"),
        ({"value": {"band": None}}, "verdict is PASS, but it has neither a band nor a baseline"),
        ({"value": {"band": {"lowest": 2.1, "highest": 3.0}}}, "PASS, but 2.0 is behind 2.10, which its band allows"),
        ({"value": {"baseline": 3.0, "tolerance": 0.05}}, "PASS, but 2.0 is behind 2.85, which its b"),
        (
            {"value": {"verdict": "MARGINAL", "baseline": 3.0, "tolerance": 0.05}},
            "MARGINAL, but 2.0 is far behind 2.85, which its baseline allows",
        ),
        (
            {"value": {"bound": {"value": 1.9, "formula": "data sheet", "certain": True}}},
            "verdict is PASS, but 2.0 is 105% of its bound, which is a FAIL",
        ),
        ({"value": {"better": "zero"}}, "tests[0]: values[0]: verdict is PASS, but windows counts 2.0 where any error"),
        ({"value": {"better": "rare"}}, "windows counts 2.0 where any error is a MARGINAL"),
        ({"value": {"windows": [None]}}, "tests[0]: values[0]: verdict is PASS, but windows has null, which is a FAIL"),
        (
            {"tests": [TEST | {"verdict": "NOT RUN", "values": []}] * 2},
            "tests[1]: name is 'kernels', which an earlier test has",
        ),
        ({"schema_version": True}, "schema_version is True, not a number"),
        ({"device": "NVIDIA H200", "value": {"name": "core_clock"}}, "device is the GPU NVIDIA H200, but tests[0]"),
        (
            {"device": "H200", "value": {"name": "core_clock"}},
            "device is the GPU H200, but tests[0]: values[0] is a proc",
        ),
        ({"verdict": "NO REFERENCE"}, "verdict is 'NO REFERENCE', but its tests give PASS"),
    ],
)
def test_every_command_names_the_damage_of_a_file_in_one_line(
    command: str, damage: dict[str, Any], words: str, tmp_path: Path
) -> None:
    of_value, of_test = damage.get("value", {}), damage.get("test", {})
    of_file = {"verdict": "PASS"} | {name: one for name, one in damage.items() if name not in ("value", "test")}
    tests = [TEST | {"values": [VALUE | {"median": 2.0, "windows": [2.0]} | of_value]} | of_test]
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(document("A processor, 2 cores", {}) | {"tests": tests} | of_file))
    start = ["qualify", "--tests", "facts", "--baseline"] if command == "baseline" else command.split()
    code, out, err = call_here(*start, file, "--out", tmp_path / "new")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "damaged.json: " in err and words in err
    assert "repeat megatoken qualify" in err


def test_stored_qualifications_are_whole() -> None:
    stored = [json.loads(file.read_text()) for file in RESULTS.glob("*qualify*.json")]
    whole = [one for one in stored if one.get("kind") == "qualify"]
    assert len(whole) >= 6
    for one in whole:
        check_document(one, "file")
        check_document(one | {"machine": one["machine"] | {"gpus": []}}, "of a machine without nvidia-ml-py")


@pytest.mark.parametrize(
    ("rate", "conclusion"),
    [
        (86.0, "86 tokens/s are 86% of the 100 that qualify predicts: they agree within 15%"),
        (114.0, "they agree within 15%"),
        (84.0, "something slowed the run down"),
        (116.0, "other work slowed the qualification down"),
    ],
)
def test_a_measured_rate_is_said_to_agree_with_the_predicted_one_or_what_it_means(rate: float, conclusion: str) -> None:
    assert conclusion in agreement(rate, 100.0)
