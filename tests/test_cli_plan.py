"""``megatoken plan``."""

import json
from pathlib import Path
from typing import get_args

import pytest

from cli_results import RACK, document_of, hostile_paths, refused, two_runs
from cli_support import call, call_here, redirected
from examples import every
from megatoken.engine.config import Precision

PLANS = ("capacity", "fleet", "energy", "cost")
DEMAND = ("--demand", 5000, "--accelerators-per-node", 4, "--profile", "simple_qa")


def test_the_documents_capacities(tmp_path: Path) -> None:
    code, stdout, err = call("plan", "capacity", *RACK, "--out", tmp_path)
    assert (code, err) == (0, "")
    (line,) = (line for line in stdout.splitlines() if line.startswith("Document rounded, interactions/s"))
    assert line.split()[-4:] == ["1,690", "440", "440", "110"]
    assert json.loads((tmp_path / "plan_capacity.json").read_text())["kind"] == "plan_capacity"
    assert "1,690" in (tmp_path / "plan_capacity.html").read_text()


def test_twelve_nodes_replaced_by_twelve() -> None:
    new = ("--tokens-per-second", 52_061.6, "--per", "node", "--accelerators", 4, "--state", "verified")
    code, stdout, _ = call_here("plan", "fleet", *new, "--replace-nodes", 12, "--replace-rate", 48_088)
    assert code == 0
    assert "12 nodes" in stdout
    assert "11.08" in stdout


def test_the_documents_efficiency() -> None:
    code, stdout, _ = call_here("plan", "energy", *RACK)
    assert code == 0
    for words in ("10.92", "10.01", "4.375", "10.85", "5.57", "nameplate"):
        assert words in stdout


def test_cost_is_made_of_assumptions_that_are_printed_and_can_be_set() -> None:
    code, stdout, _ = call_here("plan", "cost", *RACK)
    assert code == 0
    assert "assumed" in stdout
    dear, cheap = (
        document_of("plan", "cost", *RACK, "--set", f"electricity_dollars_per_kwh={price}")["results"][0]["value"]
        for price in (0.5, 0.05)
    )
    assert dear > cheap
    rented = document_of("plan", "cost", *RACK, "--rent", 4)
    assert rented["results"][0]["value"] != cheap
    (lines,) = [table for table in rented["tables"] if table["name"] == "lines"]
    assert lines["note"].startswith("Each state is that of the cost per million output tokens")
    hour = lines["rows"][0]["cost_dollars_per_hour"]
    of_machine = document_of("plan", "cost", *RACK, "--dollars-per-hour", hour)
    assert of_machine["results"] == rented["results"]
    code, _, err = call_here("plan", "cost", *RACK, "--dollars-per-hour", hour, "--rent", 4)
    assert code == 2 and "--rent with --dollars-per-hour" in err


def test_the_price_of_a_machine_needs_no_number_of_accelerators_and_its_first_lines_name_what_it_includes() -> None:
    code, _, err = call_here("plan", "cost", "--tokens-per-second", 200, "--per", "rack", "--dollars-per-hour", 100)
    assert code == 2 and "--accelerators" in err  # whose staff grows with their number
    machine = ("plan", "cost", "--tokens-per-second", 200, "--per", "system", "--dollars-per-hour", 0.2)
    code, stdout, err = call_here(*machine)
    assert code == 0, err
    headline = stdout.splitlines()[1]
    assert "assumed · rent 0.628 + staff 0.448 + network egress 0.0217 + storage 0.0188" in headline
    uncounted, counted = (document_of(*machine, *more) for more in ((), ("--accelerators", 1)))
    assert uncounted["results"] == counted["results"]
    of_staff = "Staff is that of one accelerator, as the number of accelerators is unknown"
    assert [of_staff in " ".join(document["notes"]) for document in (uncounted, counted)] == [True, False]


def test_flags_reach_the_plan(tmp_path: Path) -> None:
    shape = ("--nodes-per-rack", 18)
    base = document_of("plan", "fleet", *RACK, *DEMAND, *shape)["results"][0]["value"]
    spared = document_of("plan", "fleet", *RACK, *DEMAND, "--spare", 3, "--nodes_per_rack", 18)["results"][0]["value"]
    assert spared == base + 2
    assert (
        document_of("plan", "fleet", *RACK, *DEMAND, *shape, "--factor", "makespan=0.5")["results"][0]["value"] > base
    )
    burst = ("--curve", "office_day", "--burst-tokens-per-second", 31_000, "--burst-accelerators-per-node", 8)
    tables = document_of("plan", "fleet", *RACK, *DEMAND, *burst)["tables"]
    assert "policies" in json.dumps(tables)
    (tmp_path / "profiles.yaml").write_text("profiles: {mine: {input_tokens: 10, output_tokens: 20}}")
    mine = document_of("plan", "capacity", *RACK, "--profiles", tmp_path / "profiles.yaml", "--profile", "mine")
    assert [profile["name"] for profile in mine["profiles"]] == ["mine"]
    watts = document_of("plan", "energy", *RACK, "--watts", 132_000, "--boundary", "wall", "--watts-state", "measured")
    assert watts["inputs"] != document_of("plan", "energy", *RACK)["inputs"]


def test_a_power_limit_is_a_model_on_the_page_and_in_the_document(tmp_path: Path) -> None:
    rate = ("--tokens-per-second", 4476, "--per", "accelerator", "--accelerator", "H200", "--state", "measured")
    code, stdout, err = call_here("plan", "energy", *rate, "--power-limit", 600, "--out", tmp_path)
    assert code == 0, err
    document = json.loads((tmp_path / "plan_energy.json").read_text())
    page = (tmp_path / "plan_energy.html").read_text()
    asked = document["tables"][0]["rows"][1]
    for text in (document["title"], stdout, page):
        assert "by a model, not measured" in text
    for text in (stdout, page):
        assert f"{asked['output_tokens_per_joule']:.2f}" in text and f"{asked['output_tokens_per_second']:,.0f}" in text
        assert "no card ran at a lower limit" in " ".join(text.split())
    code, _, err = call_here("plan", "energy", *RACK, "--power-limit", 600)
    assert code == 2 and "it is of H200 only" in err


def test_all_four_of_a_real_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = two_runs(tmp_path_factory)
    more = {
        "capacity": (),
        "fleet": ("--demand", 0.1, "--accelerators", 1, "--accelerators-per-node", 1, "--profile", "simple_qa"),
        "energy": ("--watts", 65),
        "cost": ("--watts", 65, "--accelerators", 1),
    }
    for plan in PLANS:
        assert document_of("plan", plan, first, *more[plan])["kind"] == f"plan_{plan}"
    assert "too similar to price" in refused("plan", "capacity", first, "--second-run", second)
    both = document_of("plan", "capacity", first.parent)["inputs"][0]
    rates = [json.loads((run / "result.json").read_text())["output_tokens_per_second"] for run in (first, second)]
    assert both["value"] == pytest.approx((rates[0] * rates[1]) ** 0.5)  # the geometric mean
    assert both["low"] < min(rates) <= max(rates) < both["high"]


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_no_run(plan: str, tmp_path: Path) -> None:
    for path in hostile_paths(tmp_path).values():
        assert str(path) in refused("plan", plan, path)


def test_what_cannot_be_planned() -> None:
    for arguments, why in (
        (("capacity",), "give a run folder, or --tokens-per-second with --per"),
        (
            ("capacity", "--tokens-per-second", "nan", "--per", "rack"),
            "--tokens-per-second: expected a number",
        ),
        (
            ("capacity", "--tokens-per-second", 5, "--per", "rak"),
            "--per: expected one of accelerator, node, rack,",
        ),
        (("capacity", *RACK, "--set", "pu=3"), "did you mean pue?"),
        (("capacity", *RACK, "--profile", "simple"), "did you mean simple_qa?"),
        (("capacity", *RACK, "--demand", 5), "--demand: unknown flag"),
        (("energy", *RACK, "--wats", 5), "--wats: unknown flag; did you mean --watts?"),
        (
            ("energy", *RACK, "--watts", 5, "--boundary", "wal"),
            "--boundary: expected one of accelerators, wall, got 'wal'",
        ),
        (("capacity", *RACK, "--counted", "all"), "--counted: expected one of output, total, got 'all'"),
        (
            ("capacity", *RACK, "--scenario", "offlin"),
            "--scenario: expected one of offline, server, interactive",
        ),
        (("capacity", *RACK, "--state", "sure"), "got 'sure'"),
        (("energy", *RACK, "--watts", 5, "--watts-state", "sure"), "--watts-state: expected one of"),
        (("energy", *RACK, "--boundary", "wall"), "--boundary wall needs --watts"),
        (("energy", *RACK, "--watts", -1), "--watts: expected a number"),
        (("cost", *RACK, "--rent", 0), "--rent: expected a number"),
        (("cost", *RACK, "--rent", 4, "--watts", 5), "--watts with --rent: the rent includes power"),
        (
            ("fleet", *RACK, *DEMAND, "--unit", "user"),
            "--unit: expected one of output-tokens, interactions,",
        ),
        (("fleet", *RACK, *DEMAND, "--fault-domain", "row"), "--fault-domain: expected node or rack, got 'row'"),
        (("fleet", *RACK, *DEMAND, "--unit", "output-tokens"), "--profile with --unit output-tokens"),
        (("fleet", *RACK, *DEMAND, "--burst-tokens-per-second", "inf"), "--burst-tokens-per-second: expected a number"),
        (("fleet", *RACK, *DEMAND, "--replace-nodes", 3, "--replace-rate", 5), "--demand with --replace-nodes"),
        (("cost", *RACK, "--watts", "many"), "--watts: must be a number, got 'many'"),
        (("fleet", *RACK, "--burst-accelerators-per-node", 8), "needs --burst-tokens-per-second"),
        (("capcity", *RACK), "Did you mean 'capacity'?"),
        (("capacity", *RACK, "--out", "/dev/null/out"), "cannot be written"),
    ):
        assert why in refused("plan", *arguments)


def test_help_alone_and_a_closed_output() -> None:
    code, stdout, err = call("plan")
    assert (code, err) == (0, "")
    assert all(plan in stdout for plan in PLANS)
    for arguments in ((), ("capacity", *RACK, "--json"), *every(("capacity", *RACK))):
        code, _, err = redirected(">&-", "plan", *arguments)
        assert (code, err) == (1, "megatoken: cannot write to standard output: Bad file descriptor\n")


THROUGHPUT = ("plan", "throughput", "--gpu", "H200")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "llama3.1-405b", "--engine.tensor_parallel", 4), "give --gpus-per-node 4"),
        (("--gpus-per-node", 0), "--gpus-per-node: expected 1 or more, got 0"),
        (("--nodes", -1), "--nodes: expected 1 or more, got -1"),
        (("--minutes", 0), "--minutes is 0; "),
        (("--minutes", "nan"), "--minutes is nan; "),
        (("--minutes", "inf"), "--minutes is inf; "),
        (("--minutes", 1e9), "--minutes is 1e+09; give a number above 0, at most 1,440: a simulated day"),
        (("--output-tokens", -3), "--output-tokens: expected a mean of 1 to 999,999, got -3"),
        (("--engine.device", "cpu"), "--engine.device: this machine computes nothing"),
        (("--engine.threads=7",), "--engine.threads: this machine computes nothing"),
    ],
)
def test_a_flag_that_cannot_be_simulated_is_named(flags: tuple[object, ...], said: str) -> None:
    assert said in refused(*THROUGHPUT, *flags)


def test_the_help_lists_every_precision_that_the_command_accepts() -> None:
    assert f"--precision {'|'.join(get_args(Precision))} " in call_here("plan", "throughput", "--help")[1]


def test_a_mixture_of_experts_is_an_upper_bound() -> None:
    (note,) = (
        note
        for note in document_of(*THROUGHPUT, "--minutes", 0.01, "--output-tokens", 2, "--model", "gpt-oss-20b")["notes"]
        if "experts" in note
    )
    assert "an upper bound" in note


def test_lengths_of_another_model_are_told_of(tmp_path: Path) -> None:
    short = (*THROUGHPUT, "--minutes", 0.01, "--output-tokens", 2)
    shared = (*short, "--model", "llama3.1-405b", "--engine.tensor_parallel", 4, "--gpus-per-node", 4)
    (note,) = (note for note in document_of(*shared)["notes"] if "lengths" in note)
    assert "MLPerf's llama2-70b, not of llama3.1-405b" in note and "--lengths" in note
    (tmp_path / "own.csv").write_text("input_tokens,output_tokens\n100,2\n")
    for flags in (short, (*shared, "--lengths", tmp_path / "own.csv")):
        assert not [note for note in document_of(*flags)["notes"] if "lengths" in note]
