"""Equal runs together: rates have a mean and an interval, percentiles do not."""

from dataclasses import replace

from megatoken.results import RunFolder, SampleRow, read_run
from megatoken.results.repeats import describe_repeats, summarise_repeats


def test_percentiles_of_runs_are_listed_not_averaged(tmp_path):
    runs = []
    for number, p99 in enumerate((0.5, 1.5, 4.0)):
        folder = RunFolder.create(tmp_path, str(number), {}, {}, scenario="server", facts={"model": "tiny"})
        folder.add_samples([SampleRow(0, 0, 0.0, 0.0, 0.5, 1.0 + number, 9, 5, "length", "host")])
        folder.finish({"verdict": "MEASURED", "reasons": [], "loadgen_ttft_p99_seconds": p99})
        runs.append(read_run(folder.path))
    document = summarise_repeats(runs, 3)
    assert document["metrics"]["output_tokens_per_second"]["values"] == [5.0, 2.5, 5 / 3]
    assert not [name for name in document["metrics"] if "_p9" in name]
    assert document["percentiles"] == {"loadgen_ttft_p99_seconds": {"values": [0.5, 1.5, 4.0]}}
    assert "loadgen_ttft_p99_seconds of each run: 0.5, 1.5, 4" in list(describe_repeats(document))
    lacking = [*runs[:2], replace(runs[2], result={**runs[2].result, "loadgen_ttft_p99_seconds": None})]
    assert summarise_repeats(lacking, 3)["percentiles"] == {}
