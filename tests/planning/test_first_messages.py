"""What a plan says first: all that is missing at once, with an example that works, and ranges with one too."""

import re
import shlex

import pytest

from cli_support import call_here
from run_folders import run_folder


@pytest.fixture
def run(tmp_path):
    """A run of a machine without accelerators."""
    return run_folder(tmp_path, "run", "host", "2026-11-20T10:00:00+00:00").path


def refusal(*arguments: object) -> str:
    code, out, err = call_here("plan", *arguments)
    assert (code, out) == (2, "")
    return err


@pytest.mark.parametrize("given", [(), ("--accelerators", 1), ("--watts", 90), ("--rent", 0.3)], ids=str)
def test_cost_names_all_that_is_missing_with_commands_that_work(run, given):
    message = refusal("cost", run, *given)
    examples = re.findall(r"megatoken (plan cost [^;\n]+)", message)
    assert examples and ("--rent" in message or given[0] == "--watts")
    for example in examples:
        code, out, err = call_here(*shlex.split(example))
        assert (code, err) == (0, "") and "Cost per million output tokens" in out


def test_energy_and_buy_name_what_they_need(run):
    (example,) = re.findall(r"megatoken (plan energy .+)", refusal("energy", run))
    assert call_here(*shlex.split(example))[0] == 0
    order = ("buy", run, "--seats", 5, "--profile", "rag")
    message = refusal(*order)
    assert "--accelerator, such as GB300" in message and "--accelerators, how many" in message
    flags = message.split("for example: ")[1].split()
    code, out, _ = call_here("plan", *order, *flags)
    assert code == 0 and "2 nodes, 2 accelerators," in out
    of_system = ("buy", "--tokens-per-second", 20, "--per", "system", "--seats", 5, "--profile", "rag")
    for given in ((), ("--rent", 0.3), ("--accelerators", 2)):
        message = refusal(*of_system, *given)
        flags = message.split("for example: ")[1].split()
        assert not set(map(str, given[::2])) & set(flags)
        assert call_here("plan", *of_system, *given, *flags)[0] == 0


def test_a_purchase_says_next_to_its_price_how_little_it_is_used():
    code, out, _ = call_here("plan", "buy", "--seats", 5000, "--profile", "rag", "--accelerator", "GB300")
    lines = out.splitlines()
    price = next(at for at, line in enumerate(lines) if line.startswith("Cost per million output tokens"))
    assert code == 0 and "a mean utilisation of 0.0" in lines[0] and lines[price + 1].startswith("Mean utilisation")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("buy", "--seats", 0, "--profile", "rag", "--accelerator", "GB300"), "above 0, such as --seats 5000, got 0"),
        (("buy", "--seats", 10**11, "--profile", "rag", "--accelerator", "GB300"), "at most 1,000,000 can be planned"),
        (("cost", "--accelerators", 1, "--watts", -3), "above 0, such as --watts 700, got -3"),
        (("cost", "--accelerators", 0, "--rent", 1), "expected 1 to 1,000,000,000, such as --accelerators 1, got 0"),
        (("fleet", "--accelerators", 1, "--demand", 1, "--profile", "rag", "--spare", -1), "such as --spare 1, got -1"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range_and_an_example(run, arguments, words):
    kind, *flags = arguments
    message = refusal(kind, *([] if kind == "buy" else [run]), *flags)
    assert words in message and "--demand" not in message


def test_headlines_say_each_noun_once_and_no_spare_is_named_that_is_none(run):
    rate = ("--tokens-per-second", 100, "--per", "accelerator", "--accelerator", "GB300")
    _, out, _ = call_here("plan", "fleet", "--demand", 1, "--profile", "rag", *rate, "--spare", 0)
    assert out.splitlines()[1] == "1 rack  assumed" and "Spare nodes" not in out and "Nodes that fill the rack" in out
    _, out, _ = call_here("plan", "energy", run, "--watts", 100)
    assert "output tokens/J  whole machines at the wall" in out.splitlines()[1]
    _, out, _ = call_here("plan", "cost", run, "--accelerators", 1, "--rent", 0.2)
    assert re.fullmatch(
        r"[\d.,]+ \$  Cost per million output tokens · assumed · rent .+ \+ staff .+", out.splitlines()[1]
    )
