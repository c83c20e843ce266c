"""Traces of three formats: times, lengths, shared blocks; what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatoken.datasets.traces import MOONCAKE_BLOCK, read_trace
from megatoken.errors import DatasetError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:17:00.0000000,0,7
"""
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
120,GPT-4,300,0,300,API log
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def test_azure_times_have_seven_digits_and_are_sorted(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))
    assert trace.format == "Azure"
    assert trace.due_seconds == pytest.approx([0.0, 4.314579], abs=1e-6)
    assert trace.input_tokens.tolist() == [374, 396]
    assert trace.output_tokens.tolist() == [44, 109]
    assert trace.skipped == 1
    assert read_trace(written(tmp_path, AZURE_2024)).input_tokens.tolist() == [2162]


def test_burst_gpt_leaves_failures_out(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, BURST_GPT))
    assert trace.due_seconds.tolist() == [0.0, 40.0]
    assert trace.output_tokens.tolist() == [18, 230]
    data_set = trace.dataset(vocabulary_size=100, max_length=4096)
    assert len(data_set.requests[1].prompt) == 1087
    assert data_set.requests[1].max_tokens == 230
    assert max(data_set.requests[0].prompt) < 100
    assert data_set.notes == ("1 row without a prompt or an answer left out",)


def test_mooncake_prompts_share_the_blocks_of_equal_hashes(tmp_path: Path) -> None:
    text = mooncake((1000, 1200, 5, [7, 8, 9]), (3500, 1100, 6, [7, 8, 10]), (3500, 600, 1, [11, 12]))
    trace = read_trace(written(tmp_path, text))
    assert trace.due_seconds.tolist() == [0.0, 2.5, 2.5]
    one, two, three = (
        np.array(request.prompt) for request in trace.dataset(vocabulary_size=50_000, max_length=8192).requests
    )
    assert [len(one), len(two), len(three)] == [1200, 1100, 600]
    assert (one[: 2 * MOONCAKE_BLOCK] == two[: 2 * MOONCAKE_BLOCK]).all()
    assert (one[2 * MOONCAKE_BLOCK : 1100] != two[2 * MOONCAKE_BLOCK :]).mean() > 0.9
    assert (one[:600] != three).mean() > 0.9


def test_prompts_depend_on_the_seed_alone(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))
    first, again, other = (
        trace.dataset(vocabulary_size=99, max_length=999, seed=seed).requests[0] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_what_exceeds_the_context_is_scaled_down(tmp_path: Path) -> None:
    data_set = read_trace(written(tmp_path, BURST_GPT)).dataset(vocabulary_size=100, max_length=100)
    assert (data_set.input_tokens + data_set.output_limits <= 100).all()
    assert "scaled down" in data_set.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("a,b\n1,2\n", "not a trace"),
        (AZURE.replace("396", "x"), "line 2: ContextTokens"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "yesterday"), "line 2: TIMESTAMP"),
        (AZURE.replace("2023-11-16", "2023-19-16"), "no such date"),
        (BURST_GPT.replace("45,", "-1,"), "line 3: Timestamp"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,0,5\n", "no request has"),
        ('{"timestamp": 1, "input_length": 2}\n', "line 1: not of a trace, for it has no output_length; give JSON"),
        ('{"prompt": "Hello"}\n', "has no timestamp, input_length, output_length; give .* or a CSV with the columns"),
        ('{"timestamp": 1, "input_length": 2, "output_length": null}\n', "line 1: output_length is 'None'"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": ["a"]}\n', "hash_ids"),
        ('{"timestamp": 1\n', "line 1: not a JSON object"),
        ("{}[]\n", "line 1: not a JSON object"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=message):
        read_trace(written(tmp_path, text))
