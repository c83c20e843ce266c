"""How keys and values are written."""

import pytest

from megatoken.report.words import aligned, clean, label, labelled, plain_text


def test_thousands_of_a_column_are_written_alike():
    assert aligned(["3,543", "3,798.9", "99.6", "-"]) == ["3,543.0", "3,798.9", "99.6", "-"]
    assert aligned(["3,543", "99.6"]) == ["3,543", "99.6"]


@pytest.mark.parametrize(
    ("key", "name", "unit"),
    [
        ("output_tokens_per_second", "Output", "tokens/s"),
        ("per_gpu_tokens_per_second", "Per GPU", "tokens/s"),
        ("duration_seconds", "Duration", "s"),
        ("output_tokens", "Output tokens", ""),
        ("accelerators_per_node", "Accelerators per node", ""),
        ("energy_joules_per_output_token", "Energy", "J/output token"),
        ("cost_dollars_per_million_output_tokens", "Cost", "$/million output tokens"),
        ("tokens_per_second_per_watt", "Tokens per second per watt", ""),
        ("nameplate_watts", "Nameplate", "W"),
        ("target_qps", "Target QPS", ""),
        ("site_watt_hours_per_interaction", "Site", "Wh/interaction"),
        ("", "", ""),
    ],
)
def test_a_key_gives_label_and_unit(key, name, unit):
    assert label(key) == (name, unit)


def test_shares_are_percent_and_names_are_not_counted():
    assert labelled("overlap_share", 0.9074) == ("Overlap", "%", "90.74")
    assert labelled("process_id", 30040) == ("Process ID", "", "30040")


def test_thousands_of_requests_and_users_have_no_tenths():
    assert labelled("in_flight_requests", 187_990.04)[2] == "187,990"
    assert labelled("users", 5_280.4)[2] == "5,280"
    assert labelled("users", 52.84)[2] == "52.84"


def test_plain_text_of_whatever_json_holds():
    assert plain_text({"value": 4.375, "duration_seconds": 2, "on": True, "none": None}) == (
        "Value: 4.375; Duration: 2 s; On: yes; None: -"
    )
    assert plain_text(["a", 1, [2]]) == "a, 1, 2"
    assert plain_text([]) == plain_text("") == plain_text(None) == "-"


def test_text_that_could_do_harm_is_defused():
    assert clean("a\x1b[31mb\x00\u202ec\ud800d\r\ne") == "a�[31mb��c�d\ne"
    assert clean("x" * 10_000).endswith("… (10,000 characters)")
    assert len(clean("x" * 10_000)) < 2100
