"""Real run folders, edited by hand: what a run tells of its subject and of its answers is held against the rest."""

import hashlib
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_support import call_here
from megatoken.audit import Finding, Severity, audit
from megatoken.engine.config import model_folder
from megatoken.runs.reasons import TEMPLATES, Reason, reason

Edit = Callable[[Path], object]
FP32 = ("--precision", "fp32")  # of the model that ships: most processors multiply bf16 three times as slowly
OPTIONS = ("--engine.threads", 1, "--warm-up", 0.2, "--json")
TINY = ("--model", "tiny", "--engine.max-length", 64)  # answers of the data set are scaled down to it
FEW = (*TINY, "--engine.max_sequences", 4)  # so that a soak drains soon
LOG = "mlperf/mlperf_log_accuracy.json"
BASELINE = json.loads((model_folder("reference") / "baseline.json").read_text())


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of random weights."""
    return made(tmp_path_factory, "run", *TINY, "--samples", 40, "--precision", "bf16")


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An accuracy run of the model that ships, over some of its rows."""
    return made(tmp_path_factory, "run", "--mode", "accuracy", "--samples", 48, *FP32)


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of TEST06."""
    load = ("--scenario", "server", "--rate", 25)
    return made(tmp_path_factory, "run", "--compliance", "TEST06", *load, *FP32)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the Server scenario that is too short for early stopping."""
    load = ("--scenario", "server", "--rate", 10, "--min-duration", 1.2345)
    return made(tmp_path_factory, "run", *TINY, *load)


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A soak that is too short to be judged."""
    return made(tmp_path_factory, "soak", *FEW, "--duration", "2s")


@pytest.fixture(scope="module")
def of_the_soak(soaked: Path) -> dict[str, str]:
    """What an audit holds against it as it was made."""
    return held_against(audit(soaked).findings)


def made(factory: pytest.TempPathFactory, *arguments: object) -> Path:
    _, out, err = call_here(*arguments, *OPTIONS, "--out", factory.mktemp("runs"))
    assert err == "" or "Traceback" not in err
    return Path(json.loads(out)["run_folder"])


def edited(run: Path, tmp_path: Path, *edits: Edit) -> dict[str, str]:
    """What an audit of a copy holds against it after the edits, without what a busy machine does to a run."""
    folder = Path(shutil.copytree(run, tmp_path / run.name))
    for edit in edits:
        edit(folder)
    return held_against(audit(folder).findings)


def held_against(findings: Iterable[Finding]) -> dict[str, str]:
    kinds = (Severity.FAIL, Severity.WARN, Severity.UNKNOWN)
    return {item.id: item.found for item in findings if item.severity in kinds}


def in_result(**values: Any) -> Edit:
    return in_json("result.json", **values)


def in_json(name: str, **values: Any) -> Edit:
    """Sets keys, whose double underscores lead into what they hold; a function makes the new value of the old."""

    def edit(folder: Path) -> None:
        path = folder / name
        document = json.loads(path.read_text())
        for key, value in values.items():
            *above, last = key.split("__")
            holder = document
            for part in above:
                holder = holder[part]
            holder[last] = value(holder.get(last)) if callable(value) else value
        path.write_text(json.dumps(document))

    return edit


def without(*names: str) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "result.json"
        document = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in document.items() if name not in names}))

    return edit


def in_config(section: str | None, **values: Any) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "config.yaml"
        config = yaml.safe_load(path.read_text())
        (config[section] if section else config).update(values)
        path.write_text(yaml.safe_dump(config))

    return edit


def in_text(name: str, old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize("kind", ["drawn", "scored", "served", "tested"])
def test_what_was_not_edited_passes(kind: str, request: pytest.FixtureRequest) -> None:
    findings = audit(request.getfixturevalue(kind)).findings
    assert held_against(findings) == {}
    passed = {item.id for item in findings if item.severity is Severity.PASS}
    assert {
        f"run_folder.{name}" for name in ("metrics", "configuration", "notes", "memory", "times", "verdict")
    } <= passed
    assert ("accuracy.recomputed" in passed) is (kind == "scored")
    assert ("compliance.recomputed" in passed) is (kind == "tested")


@pytest.mark.parametrize(
    ("edits", "found"),
    [
        (
            [in_config("rack", simulated_gpu="GB300")],
            "config.yaml rack.simulated_gpu GB300, target.simulated_gpu None",
        ),
        (
            [in_result(target__simulated_gpu="H200")],
            "config.yaml rack.simulated_gpu None, target.simulated_gpu H200",
        ),
        (
            [
                in_config("rack", simulated_gpu="H200"),
                in_result(
                    target__simulated_gpu="H200",
                    notes=[reason("SIMULATED_GPU", gpu="H200")],
                    weights="ab",
                    random_weights=False,
                ),
            ],
            "simulated GPUs, with weights ab",
        ),
    ],
)
def test_contradictions_about_simulation(drawn: Path, tmp_path: Path, edits: list[Edit], found: str) -> None:
    assert found in edited(drawn, tmp_path, *edits)["run_folder.configuration"]


def test_a_simulation_that_every_file_names_is_no_contradiction(drawn: Path, tmp_path: Path) -> None:
    def named(notes: list[Reason]) -> list[Reason]:
        return [note for note in notes if note["code"] != "RANDOM_WEIGHTS"] + [reason("SIMULATED_GPU", gpu="h200")]

    edits = (
        in_config("rack", simulated_gpu="h200"),
        in_result(target__simulated_gpu="H200", notes=named, plan_sha256=None),
    )
    assert not {"run_folder.configuration", "run_folder.notes"} & edited(drawn, tmp_path, *edits).keys()


@pytest.mark.parametrize(
    ("kind", "edit", "found"),
    [
        ("drawn", in_result(notes=[]), "no note RANDOM_WEIGHTS"),
        ("drawn", in_result(weights="0" * 64, random_weights=False), "note RANDOM_WEIGHTS, which has no cause here"),
        ("drawn", in_result(target__why_no_kernels="no g++"), "no note NO_KERNELS"),
        ("scored", in_result(notes=[]), "no note REFERENCE_MODEL"),
        ("tested", in_result(notes=lambda notes: notes[:1]), "no note COMPLIANCE_TEST"),
    ],
)
def test_notes_that_were_taken_out(
    kind: str, edit: Edit, found: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert found in edited(request.getfixturevalue(kind), tmp_path, edit)["run_folder.notes"]


@pytest.mark.parametrize(
    ("share", "note"), [(0.4, None), (0.06, None), (0.4, 10), (0.4, 41), (0.001, 50), (None, 50), (7.0, None)]
)
def test_a_wait_for_cores_and_its_note(drawn: Path, tmp_path: Path, share: float | None, note: int | None) -> None:
    def busy(notes: list[Reason]) -> list[Reason]:
        kept = [one for one in notes if one["code"] != "CORE_WAIT"]
        return kept + ([reason("CORE_WAIT", share=note / 100)] if note is not None else [])

    folder = Path(shutil.copytree(drawn, tmp_path / drawn.name))
    in_result(core_wait_share=share, notes=busy)(folder)
    (found,) = [item for item in audit(folder).findings if item.id == "run_folder.notes"]
    assert found.severity is Severity.FAIL


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (
            in_result(memory_plan__weights_bytes=lambda size: size // 2),
            "memory_plan.weights_bytes 9,506,048, recomputed for tiny",
        ),
        (in_result(memory_plan__cache_bytes=lambda size: 2 * size), ", recomputed for tiny "),
        (in_result(memory_plan__available_bytes=1000), "memory_plan of tiny: tiny in bf16 does not fit"),
        (
            in_result(memory_plan__available_bytes=10**15),
            "memory_plan.available_bytes 1,000,000,000,000,000 of a machine with",
        ),
        (in_result(memory_plan__pages=lambda pages: pages + 1), "series.parquet"),
        (in_result(memory_plan__workspace_bytes=-1), "memory_plan workspace_bytes -1"),
        (in_result(peak_memory_bytes=10**15), "peak_memory_bytes 1,000,000,000,000,000 of a machine with"),
        (in_result(peak_memory_bytes=1000), "peak_memory_bytes 1,000, below weights_bytes"),
    ],
)
def test_sizes(drawn: Path, tmp_path: Path, edit: Edit, found: str) -> None:
    assert found in edited(drawn, tmp_path, edit)["run_folder.memory"]


@pytest.mark.parametrize(
    ("edits", "found"),
    [
        ([in_result(model="125m"), in_config(None, model="125m")], "weights_bytes"),
        ([in_result(precision="fp32"), in_config(None, precision="fp32")], ", recomputed for tiny "),
    ],
)
def test_another_label_in_every_place_has_other_sizes(
    drawn: Path, tmp_path: Path, edits: list[Edit], found: str
) -> None:
    assert found in edited(drawn, tmp_path, *edits)["run_folder.memory"]


@pytest.mark.parametrize(
    ("kind", "edits", "found"),
    [
        ("scored", [in_result(data_set="open_orca.jsonl")], "data_set open_orca.jsonl, data_set_source "),
        ("drawn", [in_result(data_set_rows=20_000)], "in a library of 40: "),
        ("drawn", [in_result(data_set_rows=30)], "in a library of 40: "),
        ("drawn", [in_result(data_set_rows=0)], "data_set_rows 0"),
        ("scored", [in_result(data_set_rows=40)], "data_set_rows 40 in a library of 48: 8 other rows were issued"),
        ("tested", [in_result(data_set_rows=24_576)], "LoadGen's library of all of them has 2,048"),
        (
            "drawn",
            [in_result(precision="fp8"), in_config(None, precision="fp8")],
            "precision fp8, target.fp8_scales None",
        ),
        ("drawn", [in_result(target__formats__weights="e4m3")], "precision bf16, target.formats weights e4m3, "),
        ("drawn", [in_result(target__formats=None)], "precision bf16, target.formats None"),
        (
            "drawn",
            [in_result(memory_plan__max_batched_tokens=7)],
            "memory_plan.max_batched_tokens 7, config.yaml engine.max_batched_tokens 256",
        ),
        ("drawn", [in_result(target__threads=64)], "target.threads 64, config.yaml engine.threads 1"),
        ("drawn", [in_result(target__steps_in_flight=2)], "target.steps_in_flight 2, config.yaml engine.overlap False"),
        (
            "served",
            [in_result(target__target_step_seconds=0.01)],
            "target.target_step_seconds 0.01, config.yaml engine.target_step_seconds 0.",
        ),
        (
            "drawn",
            [in_result(target__device="NVIDIA GB300"), in_json("environment.json", gpus=[{"name": "NVIDIA GB300"}])],
            "target.device NVIDIA GB300, memory_plan.device cpu",
        ),
        (
            "drawn",
            [in_result(target__device="NVIDIA GB300"), in_json("environment.json", gpus=[{"name": "NVIDIA H200"}])],
            "target.device NVIDIA GB300, environment.json NVIDIA H200",
        ),
    ],
)
def test_another_data_set_or_machine(
    kind: str, edits: list[Edit], found: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert found in edited(request.getfixturevalue(kind), tmp_path, *edits)["run_folder.configuration"]


@pytest.mark.parametrize(
    "edit",
    [
        *(without("seeds"), in_result(seeds={}), in_result(seeds__schedule=7)),
        in_result(seeds__schedule=lambda seed: seed + 1),
    ],
)
@pytest.mark.parametrize("kind", ["drawn", "scored"])
def test_seeds(kind: str, edit: Edit, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found = edited(request.getfixturevalue(kind), tmp_path, edit)["run_folder.verdict"]
    assert found.startswith(("seeds none, recomputed", "seeds.qsl none, recomputed", "seeds.schedule "))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("drawn", "samples", 24_576),
        ("drawn", "min_duration_seconds", 600.0),
        ("served", "samples", 24_576),
        ("served", "min_duration_seconds", 600.0),
        ("served", "rate", 10.001),
        ("served", "ttft_limit_seconds", 0.5),
        ("served", "tpot_limit_seconds", 0.01),
    ],
)
def test_a_configuration_that_asks_for_something_else(
    kind: str, key: str, value: float, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found = edited(request.getfixturevalue(kind), tmp_path, in_config(None, **{key: value}))
    assert f"config.yaml {key} {value}, LoadGen was asked for " in found["run_folder.configuration"]


@pytest.mark.parametrize("scenario", [(), ("--scenario", "server", "--rate", 20)])
def test_answers_of_one_token_of_which_loadgen_counts_none(
    scenario: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = made_of_lengths(tmp_path_factory, [1, 5] * 4, *scenario)
    (found,) = [item for item in audit(run).findings if item.id == "run_folder.counts"]
    assert found.severity is Severity.PASS


@pytest.mark.parametrize("scenario", [("offline",), ("server", "--rate", 20), ("singlestream",)])
def test_a_run_whose_answers_are_all_of_one_token(
    scenario: tuple[object, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = made_of_lengths(tmp_path_factory, [1] * 8, "--scenario", *scenario)
    assert edited(run, tmp_path).keys() <= {"rules.no_errors"}


def made_of_lengths(factory: pytest.TempPathFactory, max_tokens: list[int], *flags: object) -> Path:
    prompts = factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt_token_ids": [5], "max_tokens": most} for most in max_tokens]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made(factory, "run", "--model", "tiny", "--prompts", prompts, "--samples", len(rows), *flags)


def other_answers(count: int) -> Edit:
    """The first answers of the log become other tokens, as many as before; what has a hash of the log follows."""

    def edit(folder: Path) -> None:
        log = folder / LOG
        lines = log.read_text().splitlines(keepends=True)
        for number in range(1, 1 + count):
            before, data, after = lines[number].partition('"data" : "')[0::1]
            ids, rest = after.split('"', 1)
            lines[number] = f'{before}{data}{struct.pack("<i", 11).hex().upper() * (len(ids) // 8)}"{rest}'
        old = hashlib.sha256(log.read_bytes()).hexdigest()
        log.write_text("".join(lines))
        new = hashlib.sha256(log.read_bytes()).hexdigest()
        for name in ("accuracy.txt", "accuracy.json"):
            in_text(f"accuracy/{name}", old, new)(folder)

    return edit


def worse_at_the_first(by_task: dict[str, Any]) -> dict[str, Any]:
    name, metrics = next(iter(by_task.items()))
    return {**by_task, name: {**metrics, "rouge1": {**metrics["rouge1"], "value": 1.0}}}


def said_to_miss(name: str, message: str) -> Edit:
    """A reason to be INVALID: a target that was missed."""
    return in_json(name, verdict="INVALID", reasons=[{"code": "ACCURACY", "message": message}])


def missed_by_none(folder: Path) -> None:
    """Targets below the scores, and a reason that says otherwise."""
    targets = {"source": "0.5 of other", "targets": [{"name": "rouge1", "at_least": 1.0}], "rows": 48}
    in_json("accuracy/accuracy.json", targets=targets)(folder)
    said_to_miss("accuracy/accuracy.json", "rouge1 is 100; 0.5 of other asks for 101 or more")(folder)


def gated(metric_share: float, source: str = "the reference model's gate (99 % of fp32)") -> Edit:
    """The reference model's gate over these rows, asking for that share of what its baseline has."""
    targets = [{"name": name, "at_least": metric_share * one["value"]} for name, one in BASELINE["metrics"].items()]
    tokens = BASELINE["tokens_per_sample"]
    targets.append({"name": "tokens_per_sample", "at_least": 0.9 * tokens, "at_most": 1.1 * tokens})
    observed = {"source": source, "targets": targets, "rows": 48}
    return in_result(accuracy__targets=observed)


@pytest.mark.parametrize(
    ("edits", "found"),
    [
        ([in_result(data_set_rows=24_576)], "result.json data_set_rows 24576, the data set has 2048"),
        (
            [in_result(accuracy__metrics__exact_match__value=12.5)],
            "result.json accuracy metrics.exact_match.value 12.5, recomputed 100.0",
        ),
        (
            [in_result(accuracy__metrics__rouge2__value=99.0)],
            "result.json accuracy metrics.rouge2.value 99.0, recomputed 75",
        ),
        (
            [in_result(accuracy__metrics__rouge1__answers=2048)],
            "result.json accuracy metrics.rouge1.answers 2048, recomputed 48",
        ),
        (
            [in_result(accuracy__metrics__rouge2__standard_error=0.1)],
            "result.json accuracy metrics.rouge2.standard_error 0.1, recomputed 6.3",
        ),
        ([in_result(accuracy__tokens_per_sample=99.9)], "result.json accuracy tokens_per_sample 99.9, recomputed "),
        (
            [in_json("accuracy/accuracy.json", metrics__rouge1__value=12.5)],
            "accuracy.json metrics.rouge1.value 12.5, recomputed",
        ),
        ([in_json("accuracy/accuracy.json", by_task=worse_at_the_first)], ".rouge1.value 1.0, recomputed"),
        ([in_json("accuracy/accuracy.json", gen_tok_len=7)], "accuracy.json gen_tok_len 7, recomputed"),
        (
            [in_json("accuracy/accuracy.json", references_sha256="0" * 64)],
            "accuracy.json references_sha256 0000000000000000, the run had ",
        ),
        (
            [in_text("accuracy/accuracy.txt", "'exact_match': 100.0", "'exact_match': 88.5")],
            "accuracy.txt exact_match 88.5, recomputed 100.0",
        ),
        (
            [in_text("accuracy/accuracy.txt", "'gen_num': 48", "'gen_num': 2048")],
            "accuracy.txt gen_num 2048.0, recomputed 48",
        ),
        ([other_answers(24)], "result.json accuracy metrics.rouge1.value 100.0, recomputed 5"),
        ([without("accuracy")], "no result.json accuracy"),
        ([lambda folder: shutil.rmtree(folder / "accuracy")], "no accuracy/accuracy.json; no accuracy/accuracy.txt"),
        ([gated(0.5)], "result.json accuracy targets {"),
        ([gated(0.5, "MLPerf llama2-70b")], "result.json accuracy targets {"),
        ([missed_by_none], "accuracy.json verdict INVALID, recomputed VALID"),
        ([gated(0.99)], "result.json accuracy targets {"),
    ],
)
def test_scores_are_computed_again(scored: Path, tmp_path: Path, edits: list[Edit], found: str) -> None:
    assert found in edited(scored, tmp_path, *edits)["accuracy.recomputed"]


@pytest.mark.parametrize("also", [[], [without("accuracy")]])
def test_reasons_that_the_answers_do_not_give(also: list[Edit], scored: Path, tmp_path: Path) -> None:
    edits = (*also, said_to_miss("result.json", "rouge1 is 1; the gate asks for 2 or more"))
    found = edited(scored, tmp_path, *edits)["run_folder.verdict"]
    assert found.startswith("verdict INVALID, recomputed MEASURED; reasons ACCURACY, recomputed none")


def test_scores_whose_references_are_not_at_hand_are_unknown(scored: Path, tmp_path: Path) -> None:
    change = {"data_set_sha256": "1" * 64}
    edits = (in_result(**change), in_json("accuracy/accuracy.json", references_sha256="1" * 64))
    folder = Path(shutil.copytree(scored, tmp_path / "run"))
    for edit in edits:
        edit(folder)
    (found,) = [item for item in audit(folder).findings if item.id == "accuracy.recomputed"]
    assert found.severity is Severity.UNKNOWN
    assert "the expected answers, SHA-256 1111111111111111, are not here" in found.found


def in_one_record(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Edit:
    """Of an answer of three tokens or more: in a shorter one the change may be none."""

    def edit(folder: Path) -> None:
        log = folder / LOG
        lines = log.read_text().splitlines()
        records = {line: json.loads(text.rstrip(",")) for line, text in enumerate(lines) if text.startswith("{")}
        line, record = next((line, one) for line, one in records.items() if one["token_count"] > 2)
        record = change(record)
        fields = [
            f'"{key}" : ' + (f'"{value}"' if isinstance(value, str) else str(value)) for key, value in record.items()
        ]
        lines[line] = f"{{ {', '.join(fields)} }},"
        log.write_text("\n".join(lines) + "\n")

    return edit


END = struct.pack("<i", 2).hex().upper()


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (
            in_one_record(lambda record: record | {"token_data": "0A0B0000"}),
            "compliance findings none, recomputed FIRST_TOKEN_DIFFERS",
        ),
        (
            in_one_record(lambda one: one | {"data": one["data"] + 2 * END, "token_count": one["token_count"] + 2}),
            "compliance findings none, recomputed END_TOKEN_REPEATED",
        ),
        (
            in_one_record(lambda one: one | {"token_count": one["token_count"] + 1}),
            "compliance findings none, recomputed TOKEN_COUNT_DIFFERS",
        ),
        (
            in_one_record(lambda one: one | {"data": one["data"][:8] + END + one["data"][16:]}),
            "compliance/TEST06/compliance.json sound True, recomputed False",
        ),
        (in_result(compliance__passed=False), "result.json compliance passed False, recomputed True"),
        (in_result(compliance__sound=False), "result.json compliance sound False, recomputed True"),
        (in_result(compliance__findings=["one"]), "result.json compliance findings ['one'], recomputed []"),
        (without("compliance"), "no result.json compliance"),
        (
            in_text("compliance/TEST06/verify_accuracy.txt", "EOS check pass: True", "EOS check pass: False"),
            "verify_accuracy.txt: no line EOS check pass: True",
        ),
        (
            in_text("compliance/TEST06/verify_accuracy.txt", "complete", "failed"),
            "verify_accuracy.txt: no line TEST06 verification complete",
        ),
    ],
)
def test_compliance_is_tested_again(tested: Path, tmp_path: Path, edit: Edit, found: str) -> None:
    assert found in edited(tested, tmp_path, edit)["compliance.recomputed"]


@pytest.mark.parametrize(
    ("kind", "edit", "found"),
    [
        ("drawn", in_config(None, rack=7), "AttributeError"),
        ("drawn", in_config("rack", simulated_gpu={}), "TypeError"),
        ("scored", in_json("accuracy/accuracy.json", notes=7), "TypeError"),
        ("tested", in_json("environment.json", gpus=[{"name": 7}]), "environment.json is damaged"),
    ],
)
def test_fields_of_a_kind_that_no_run_writes(
    kind: str, edit: Edit, found: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert any(found in one for one in edited(request.getfixturevalue(kind), tmp_path, edit).values())


def test_a_compliance_test_that_was_not_passed_fails(tested: Path, tmp_path: Path) -> None:
    reasons = [{"code": "COMPLIANCE", "message": "100 of 100 answers end with more than one end token"}]
    for passed, severity in ((False, Severity.FAIL), (True, Severity.WARN)):
        folder = Path(shutil.copytree(tested, tmp_path / severity))
        in_result(verdict="INVALID", reasons=reasons, compliance__passed=passed)(folder)
        (found,) = [item for item in audit(folder).findings if item.id == "run_folder.healthy"]
        assert found.severity is severity


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (in_json("compliance/TEST06/compliance.json", sound=False), "compliance.json sound False, recomputed True"),
        (in_result(compliance__end_token_ids=[3]), "result.json compliance end_token_ids.0 3, recomputed 2"),
        (
            in_json("compliance/TEST06/compliance.json", end_token_ids=[]),
            "compliance.json sound True, recomputed False",
        ),
    ],
)
def test_what_our_own_check_found_is_held_against_the_log(
    edit: Edit, problem: str, tested: Path, tmp_path: Path
) -> None:
    assert problem in edited(tested, tmp_path, edit)["compliance.recomputed"]


def test_a_soak_that_was_not_healthy_is_told(soaked: Path) -> None:
    assert json.loads((soaked / "result.json").read_text())["verdict"] == "INVALID"
    (found,) = [item for item in audit(soaked).findings if item.id == "run_folder.healthy"]
    assert found.severity is Severity.NOTE
    assert found.found.startswith("INVALID, UNDECIDED: TOO_SHORT ")
    assert found.reported is not None
    assert (found.reported.verdict, found.reported.stability) == ("INVALID", "UNDECIDED")
    assert found.reported.reasons[0].startswith("TOO_SHORT ")
    _, out, _ = call_here("audit", soaked)
    assert "The files agree with each other, but the run itself is INVALID, UNDECIDED: TOO_SHORT" in out
    assert "the checks found no problem, but the run itself reports a problem" in " ".join(out.split())


@pytest.mark.parametrize(
    ("edit", "check", "found"),
    [
        (in_config(None, seed=5), "run_folder.configuration", "soak.settings seed 0, config.yaml 5"),
        (in_config("engine", threads=8), "run_folder.configuration", "soak.settings engine.threads 1, config.yaml 8"),
        (
            in_config(None, min_duration_seconds=7200.0),
            "run_folder.configuration",
            "soak.settings min_duration_seconds 2.0, config.yaml 7200.0",
        ),
        (in_result(reasons=[]), "run_folder.verdict", "reasons none, recomputed TOO_SHORT"),
    ],
)
def test_what_a_soak_recorded(
    soaked: Path, of_the_soak: dict[str, str], tmp_path: Path, edit: Edit, check: str, found: str
) -> None:
    assert check not in of_the_soak
    assert found in edited(soaked, tmp_path, edit)[check]


@pytest.mark.parametrize("kind", ["drawn", "soaked"])
@pytest.mark.parametrize("place", ["reasons", "rules_unmet", "doubts"])
def test_a_reason_that_no_run_has(kind: str, place: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    def more(listed: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        return [*(listed or []), {"code": "MOON_PHASE", "message": "the moon was full"}]

    edits = [in_result(**{place: more})] + [in_result(verdict="INVALID")] * (place == "reasons")
    found = edited(request.getfixturevalue(kind), tmp_path, *edits)
    assert "MOON_PHASE" in found["run_folder.verdict"]


def test_the_codes_that_the_documentation_lists_exist() -> None:
    docs = Path(__file__).parents[2] / "docs"
    listed: set[str] = set()
    for page in ("commands.md", "scenarios.md"):
        for table in re.findall(r"(?m)^\| code \|.*\n(?:\|.*\n)+", (docs / page).read_text()):
            listed.update(*(re.findall(r"`([A-Z_]+)`", row.split("|")[1]) for row in table.splitlines()))
    assert len(listed) > 20 and listed <= TEMPLATES.keys()


def test_a_run_that_early_stopping_alone_makes_invalid_has_a_reason(served: Path) -> None:
    (found,) = [item for item in audit(served).findings if item.id == "rules.valid"]
    assert "Early Stopping Result: Run unsuccessful. Processed " in found.found
    assert found.reported is not None
    assert found.found == f"INVALID: {'; '.join(found.reported.reasons)}"


def test_a_directory_with_the_name_of_a_shape_has_end_tokens_of_its_own(tested: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tested, tmp_path / "run"))
    in_config(None, model="llama3.1-8b")(folder)
    in_result(model="llama3.1-8b")(folder)
    (found,) = [item for item in audit(folder).findings if item.id == "compliance.recomputed"]
    assert found.severity is Severity.UNKNOWN
    assert "the model's end tokens are not known here; by those that the run names, nothing differs" in found.found


def shortfalls(code: str, **values: Any) -> Edit:
    """Another number, or other words, of a rule that is not met."""

    def edit(folder: Path) -> None:
        path = folder / "result.json"
        result = json.loads(path.read_text())
        (one,) = [one for one in result["rules_unmet"] if one["code"] == code]
        one |= values
        path.write_text(json.dumps(result))

    return edit


@pytest.mark.parametrize(
    ("kind", "edit", "found"),
    [
        (
            "drawn",
            shortfalls("MIN_DURATION", found=599.9, message="ran 599.9 s of 600 s"),
            "rules_unmet.MIN_DURATION.found 599.9, recomputed ",
        ),
        (
            "drawn",
            shortfalls("MIN_DURATION", message="ran 599.9 s of 600 s"),
            "rules_unmet.MIN_DURATION.message ran 599.9 s of 600 s, recomputed ran ",
        ),
        ("drawn", shortfalls("MIN_DURATION", required=0.1), "rules_unmet.MIN_DURATION.required 0.1, recomputed 600.0"),
        (
            "drawn",
            shortfalls("MIN_SAMPLES", found=24_000),
            "rules_unmet.MIN_SAMPLES.found 24000, recomputed 40",
        ),
        (
            "drawn",
            shortfalls("DATA_SET_SIZE", found=None),
            "rules_unmet.DATA_SET_SIZE.found none, recomputed ",
        ),
        ("served", shortfalls("MIN_DURATION", found=599.9), "rules_unmet.MIN_DURATION.found 599.9, recomputed "),
        (
            "served",
            shortfalls("EARLY_STOPPING", found=458),
            "rules_unmet.EARLY_STOPPING.found 458, recomputed ",
        ),
        (
            "served",
            shortfalls("LOADGEN_INVALID", found="VALID"),
            "rules_unmet.LOADGEN_INVALID.found VALID, recomputed INVALID",
        ),
        ("scored", shortfalls("DATA_SET_SIZE", found=24_575), "rules_unmet.DATA_SET_SIZE.found 24575, recomputed 48"),
    ],
)
def test_numbers_of_rules_that_are_not_met(
    kind: str, edit: Edit, found: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    observed = edited(request.getfixturevalue(kind), tmp_path, edit)
    assert found in observed["run_folder.verdict"]
