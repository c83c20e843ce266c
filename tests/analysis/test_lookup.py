"""Which runs a path means."""

import errno
import re
from pathlib import Path

import pytest

from megatoken.analysis.lookup import names_of, read_runs, run_folders
from megatoken.analysis.repeats import REPEATS, read_repeats_in, summarise_repeats
from megatoken.errors import UsageError
from megatoken.files import to_json, write_text
from run_folders import run_folder

HOUR = "2026-11-20T{}:00:00+00:00"


@pytest.fixture
def runs(tmp_path) -> Path:
    """Two repeats, a run of another model beside them, and what is no run."""
    repeats = tmp_path / "runs" / "x-repeats"
    equal = [run_folder(repeats, f"00{i}", "host", HOUR.format(10 + i), seconds=10.0 + i) for i in range(2)]
    write_text(repeats / REPEATS, to_json(summarise_repeats(equal, 2)))
    run_folder(tmp_path / "runs", "y", "host", HOUR.format(14), model="125m")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / ".draft").mkdir()
    (tmp_path / "runs" / ".draft" / "result.json").write_text("{}")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path)
    return tmp_path / "runs"


def test_runs_are_found_where_a_person_points(runs):
    expected = ["001", "000"]
    assert [path.name for path in run_folders(runs)] == [*sorted(expected), "y"]
    assert [path.name for path in run_folders(runs.parent)] == [*sorted(expected), "y"]
    assert [path.name for path in run_folders(runs / "x-repeats")] == sorted(expected)
    assert run_folders(runs / "y") == [runs / "y"]
    assert run_folders(runs / "notes") == run_folders(runs / "absent") == []


def test_links_to_runs_are_runs_but_none_comes_twice(runs):
    elsewhere = runs.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "node 1").symlink_to(runs / "y")
    (elsewhere / "node 2").symlink_to(runs / "x-repeats" / "001")
    (elsewhere / "the first again").symlink_to(runs / "y")
    assert [path.name for path in run_folders(elsewhere)] == ["node 1", "node 2"]


def test_what_lies_inside_a_run_is_part_of_it(runs):
    run_folder(runs / "y" / "probes", "01-probe", "host", HOUR.format(15))
    assert run_folders(runs / "y") == [runs / "y"]


def test_a_strangers_result_json_further_down_is_no_run(runs):
    deep = runs / "notes" / "theirs"
    deep.mkdir()
    (deep / "result.json").write_text("[]")
    assert deep not in run_folders(runs)
    assert run_folders(deep) == [deep]  # so that reading it reports the damage


def test_a_folder_that_cannot_be_read_is_named(runs, monkeypatch):
    """Root may read everywhere, so the refusal is made here."""
    real = Path.iterdir

    def iterdir(path: Path):
        if path.name == "notes":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    message = f"{runs / 'notes'}: cannot be read (Permission denied); name the run folders directly"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        run_folders(runs)


def test_paths_without_runs_are_named(runs):
    with pytest.raises(UsageError, match="notes: no run folder and none below it; give a run folder, such as"):
        read_runs(runs / "notes")
    with pytest.raises(UsageError, match="absent: no such folder"):
        read_runs(runs / "absent")


def test_only_repeats_stand_for_one_result(runs):
    assert [run.path.name for run in read_repeats_in(runs / "x-repeats")] == ["000", "001"]
    with pytest.raises(UsageError, match="runs: y is not a repeat of 000: model is 125m, not tiny; give one of them"):
        read_repeats_in(runs)


def test_repeats_of_another_machine_or_rate_are_none(tmp_path):
    for name, facts in (("offered", {"offered_samples_per_second": 3.0}), ("threads", {"target": {"threads": 4}})):
        folder = tmp_path / name
        run_folder(folder, "a", "host", HOUR.format(10))
        run_folder(folder, "b", "host", HOUR.format(11), **facts)
        with pytest.raises(UsageError, match=f"b is not a repeat of a: {name}"):
            read_repeats_in(folder)
    run_folder(tmp_path / "hosts", "a", "one", HOUR.format(10))
    run_folder(tmp_path / "hosts", "b", "two", HOUR.format(10))
    with pytest.raises(UsageError, match="hostname is two, not one"):
        read_repeats_in(tmp_path / "hosts")


def test_short_names_tell_paths_apart():
    assert names_of([Path("/r/x/001"), Path("/r/x/002")]) == ["001", "002"]
    assert names_of([Path("/r/x/001"), Path("/r/y/001")]) == ["x/001", "y/001"]
    assert names_of([Path("/r/x"), Path("/r/x")]) == ["x", "x"]
    assert names_of([]) == []
