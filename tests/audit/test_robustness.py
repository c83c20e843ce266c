"""Hostile input: whatever a folder holds, there is an answer in one line, never a traceback, and memory stays small."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatoken import archives as archive_module
from megatoken.archives import unpacked
from megatoken.audit import Severity, audit
from megatoken.errors import MegatokenError, UsageError
from megatoken.files import UnreadableError, parse_json
from megatoken.mlperf.accuracy_log import read_accuracy_log
from megatoken.mlperf.detail_log import read_detail_log
from megatoken.mlperf.summary_log import parse_summary

DETAIL, SUMMARY, ACCURACY = "mlperf_log_detail.txt", "mlperf_log_summary.txt", "mlperf_log_accuracy.json"
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def grave(folder: Path) -> set[str]:
    return {item.id for item in audit(folder).findings if item.severity in (Severity.FAIL, Severity.WARN)}


def examined(folder: Path) -> None:
    """Audits ``folder``; nothing may go wrong inside a check, and the document must be plain JSON."""
    result = audit(folder)
    assert "log.examined" not in {item.id for item in result.findings}, result.findings
    json.dumps(result.to_document(), allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.7, 0.99])
def test_truncated_logs(twin, share):
    folder = twin()
    log = (folder / DETAIL).read_bytes()
    (folder / DETAIL).write_bytes(log[: int(len(log) * share)])
    assert grave(folder) & {"log.whole", "log.readable"}


def test_logs_that_end_after_any_whole_line(twin):
    folder = twin()
    log = (folder / DETAIL).read_bytes().splitlines(keepends=True)
    for count in range(1, len(log)):
        (folder / DETAIL).write_bytes(b"".join(log[:count]))
        assert "log.whole" in grave(folder), count


@pytest.mark.parametrize("file", [DETAIL, SUMMARY, ACCURACY])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 5000,
        random.Random(1).randbytes(100_000),
        b"PK\x03\x04" + b"x" * 100,
        "\N{GREEK SMALL LETTER MU}".encode("utf-16"),
        b"\xef\xbb\xbf[\n]\n",
        b"\xe9\xe8 latin-1\n",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b":::MLLOG " + b"[" * 500_000 + b"\n",
        b":::MLLOG " + b"9" * 500_000 + b"\n",
        b":::MLLOG {}\n:::MLLOG []\n:::MLLOG null\n:::MLLOG\n",
        b'[\n{ "seq_id" : 999999999999999999999, "qsl_idx" : 0, "data" : "0" }\n]\n',
    ],
    ids=lambda content: repr(content[:12]),
)
def test_junk_in_place_of_a_log(twin, file, content):
    folder = twin()
    (folder / file).write_bytes(content)
    examined(folder)
    assert grave(folder) or (content.startswith(b"\xef\xbb\xbf[\n]") and file == ACCURACY)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "cp037"])
def test_wrong_encodings_are_named(twin, encoding):
    folder = twin()
    (folder / DETAIL).write_text((folder / DETAIL).read_text(), encoding=encoding)
    assert grave(folder) & {"log.readable", "log.spelling"}


def test_carriage_returns_are_a_note(twin):
    folder = twin()
    for name in (DETAIL, SUMMARY, ACCURACY):
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"\n", b"\r\n"))
    found = {item.id: item.severity for item in audit(folder).findings}
    assert found["log.line_ends"] is Severity.NOTE
    assert grave(folder) == set()


def test_numbers_that_overflow(twin):
    folder = twin("Server")
    log = (folder / DETAIL).read_text()
    for text in ("1e999", "-1", "0", "NaN", "Infinity", "null", '"x"', "[]", "true", "9" * 400, "1e308", "nan", "0.0"):
        for pattern in (
            r'("key": "(?:result|effective|generated)_\w+", "value": )[\d.e+-]+',
            r'("key": "[^"]+", "value": )\d+',
        ):
            (folder / DETAIL).write_text(re.sub(pattern, lambda found, text=text: found[1] + text, log))
            examined(folder)


def test_every_value_of_every_key_as_every_type(twin):
    folder = twin()
    entries = [json.loads(line.removeprefix(":::MLLOG ")) for line in (folder / DETAIL).read_text().splitlines()]
    for wrong in (None, True, -1, 1e300, "text", [], {}, [1, "a"], {"a": 1}):
        spoiled = [{**entry, "value": wrong} for entry in entries]
        (folder / DETAIL).write_text("".join(f":::MLLOG {json.dumps(entry)}\n" for entry in spoiled))
        examined(folder)
    for field in ("key", "value", "time_ms", "metadata"):
        spoiled = [{name: item for name, item in entry.items() if name != field} for entry in entries]
        (folder / DETAIL).write_text("".join(f":::MLLOG {json.dumps(entry)}\n" for entry in spoiled))
        examined(folder)


@FUZZ
@given(data=st.data())
def test_spoiled_bytes_anywhere(originals, tmp_path_factory, data):
    file = data.draw(st.sampled_from((DETAIL, SUMMARY, ACCURACY)))
    source = originals(*data.draw(st.sampled_from((("Offline",), ("Server",), ("Offline", "AccuracyOnly")))))
    folder = tmp_path_factory.mktemp("fuzz")
    for name in (DETAIL, SUMMARY, ACCURACY):
        content = bytearray((source / name).read_bytes())
        if name == file:
            for _ in range(data.draw(st.integers(1, 8))):
                place = data.draw(st.integers(0, len(content)))
                content[place : place + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=30))
        (folder / name).write_bytes(content)
    examined(folder)


@FUZZ
@given(
    content=st.binary(max_size=2000) | st.text(max_size=2000).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_parsers_take_any_bytes(tmp_path, content):
    path = tmp_path / "file"
    for prefix in (b"", b":::MLLOG ", b'[\n{ "seq_id" : 1,'):
        path.write_bytes(prefix + content)
        for read in (read_detail_log, read_accuracy_log):
            try:
                read(path)
            except UnreadableError:
                continue
    parse_summary(content.decode("utf-8", "replace"), [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


@FUZZ
@given(
    entries=st.lists(
        st.dictionaries(st.sampled_from(("key", "value", "time_ms", "metadata", "x")), json_values), max_size=8
    )
)
def test_entries_of_any_shape(tmp_path, entries):
    path = tmp_path / DETAIL
    path.write_text("".join(f":::MLLOG {json.dumps(entry)}\n" for entry in entries))
    log = read_detail_log(path)
    assert log.lines == len(entries)


@FUZZ
@given(value=json_values)
def test_json_is_read_as_python_reads_it(value):
    text = json.dumps(value)
    if re.search(r"NaN|Infinity", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        with pytest.raises(UnreadableError):
            parse_json(text)
    else:
        assert parse_json(text) == (json.loads(text), [])


def test_duplicate_keys_are_named():
    assert parse_json('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}') == ({"a": 1, "b": {"c": 1}}, ["c", "a"])


def test_duplicate_keys_of_a_system_are_a_finding(twin):
    folder = twin(name="results")
    systems = folder.parent / "systems"
    systems.mkdir()
    (systems / "one.json").write_text('{"division": "closed",\n "status": "available",\n "division": "open"}')
    found = next(item for item in audit(folder.parent).findings if item.id == "system.readable")
    assert found.severity is Severity.FAIL
    assert "'division' stands twice" in found.found
    for content in ("[]", "{", '"x"', "\0", "{" * 100_000):
        (systems / "one.json").write_text(content)
        assert "system.readable" in grave(folder.parent)
    (systems / "one.json").write_text(
        r'{"framework": "half a pair \ud800", "number_of_nodes": 1e999, "hw_notes": {"a": [1]}}'
    )
    document = audit(folder.parent).to_document()
    json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    assert document["systems"][0]["number_of_nodes"] is None


def test_links_pipes_and_odd_names(twin, tmp_path):
    folder = twin(name="a folder \N{SNOWMAN}\n[red]x")
    odd = os.fsdecode(b"caf\xe9 \x1b[31m")
    (tmp_path / odd).mkdir()
    (folder / "user.conf").rename(tmp_path / odd / "user.conf")
    for name in (DETAIL, SUMMARY, ACCURACY):
        (tmp_path / odd / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "loop").symlink_to(tmp_path)
    (folder / "self").symlink_to(folder / "self")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "outside").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / DETAIL)
    (pipes / SUMMARY).symlink_to("/etc/passwd")
    result = audit(tmp_path)
    assert len(result.evidence.runs) == 2
    text = json.dumps(result.to_document())
    assert "\\u001b" not in text
    assert all(character.isprintable() for place in result.evidence.runs for character in place.path)
    assert "tree.links" in {item.id for item in result.findings}


def test_folders_that_cannot_be_read(twin, tmp_path):
    twin()
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    deep = tmp_path
    for _ in range(40):
        deep = deep / ("d" * 90)  # a path longer than the system takes is made from inside
    here = Path.cwd()
    try:
        os.chdir(tmp_path)
        for _ in range(60):
            Path("e" * 90).mkdir()
            os.chdir("e" * 90)
    finally:
        os.chdir(here)
    result = audit(tmp_path)
    assert len(result.evidence.runs) == 1
    assert "tree.unreadable" in {item.id for item in result.findings}
    locked.chmod(0o700)


def test_what_can_hold_no_logs_is_told_what_could(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    Path("file").touch()
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("folder", "notes.txt").write_text("no log")
    neither = "no folder, zip or tar archive; give the folder that holds the logs"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name, words in {
            **dict.fromkeys(("/dev/null", "/dev/zero", "file", "pipe", "socket"), neither),
            "absent": "no such folder or archive; give the folder that holds the logs",
            "folder": "no LoadGen logs below it; expected files named mlperf_log_detail.txt and mlperf_log_summary.txt",
        }.items():
            with pytest.raises(UsageError) as caught:
                audit(Path(name))
            assert str(caught.value) == f"{name}: {words}"


@pytest.mark.parametrize("name", ["nothing", "empty", "file.txt"])
def test_what_is_no_folder_of_logs_is_one_line(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("hello")
    with pytest.raises(UsageError) as caught:
        audit(tmp_path / name)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="not a known MLPerf Inference round"):
        audit(tmp_path, round="v9")


def test_zip_bombs_are_refused(tmp_path, twin):
    bomb = tmp_path / "bomb.zip"
    with (
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(DETAIL, "w", force_zip64=True) as member,
    ):
        for _ in range(300):
            member.write(b"\0" * 2**20)
    with pytest.raises(UsageError, match="unpacks to more than"), unpacked(bomb):
        pass
    lying = bytearray(bomb.read_bytes())
    central = lying.rindex(b"PK\x01\x02")
    lying[central + 24 : central + 28] = (1000).to_bytes(4, "little")  # the size it says it has
    bomb.write_bytes(lying)
    with pytest.raises(UsageError), unpacked(bomb):
        pass
    many = tmp_path / "names.zip"
    with zipfile.ZipFile(many, "w") as archive:
        archive.writestr("../outside.txt", "x")
    with pytest.raises(UsageError, match="outside of it"):
        audit(many)
    assert not (tmp_path / "outside.txt").exists()
    cut = tmp_path / "cut.zip"
    cut.write_bytes(lying[: len(lying) // 2])
    with pytest.raises(UsageError):
        audit(cut)
    good = tmp_path / "good.zip"
    with zipfile.ZipFile(good, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in twin().iterdir():
            archive.write(file, f"run/{file.name}")
    assert grave(good) == set()


def test_archives_of_too_many_files_are_refused_unread(tmp_path, monkeypatch):
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(1_000):
            archive.writestr(f"{number}.txt", "")
        archive.comment = b"many files " * 20
    assert archive_module._zip_members(path) == 1_000
    monkeypatch.setattr(archive_module, "MOST_MEMBERS", 999)
    monkeypatch.setattr(zipfile.ZipFile, "infolist", None)
    with pytest.raises(UsageError, match="more than 999 files"), unpacked(path):
        pass
    many = tmp_path / "zip64.zip"
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(70_000):
            archive.writestr(f"{number}", "")
    assert archive_module._zip_members(many) == 70_000
    tar = tmp_path / "many.tar"
    with tarfile.open(tar, "w") as archive:
        for number in range(1_000):
            archive.addfile(tarfile.TarInfo(str(number)))
    with pytest.raises(UsageError, match="more than 999 files"), unpacked(tar):
        pass


@pytest.mark.parametrize("file", [DETAIL, ACCURACY])
def test_lines_of_one_byte_are_not_read_for_ever(twin, monkeypatch, file):
    monkeypatch.setattr("megatoken.mlperf.detail_log.MOST_DAMAGES", 1_000)
    monkeypatch.setattr("megatoken.mlperf.accuracy_log.MOST_LINES", 1_000)
    folder = twin()
    (folder / file).write_bytes(b"\n" * 30_000_000)
    before = time.process_time()
    found = {item.id: item.found for item in audit(folder).findings if item.severity is Severity.FAIL}
    assert time.process_time() - before < 2
    assert "not read" in found["log.readable"] or "more than 1,000 lines" in found["log.readable"]


HUGE = {  # what one of many error lines becomes, and how many there are
    "one thread": (lambda line, number: line, 300_000),
    "many threads": (lambda line, number: re.sub(r'"tid": \d+', f'"tid": {1000 + number % 50_000}', line), 300_000),
    "another spelling": (lambda line, number: line.replace('": ', '":'), 300_000),
}


@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.timing
def test_a_huge_log_in_little_memory(originals, tmp_path, kind):
    """80 MB here, in a process of its own; what a gigabyte takes stands in docs/audit.md."""
    spell, count = HUGE[kind]
    folder = tmp_path / "huge"
    folder.mkdir()
    log = (originals() / DETAIL).read_text().splitlines(True)
    error = log[-1].replace('"num_errors"', '"error_runtime"').replace('"is_error": false', '"is_error": true')
    with (folder / DETAIL).open("w") as file:
        file.writelines(log[:-1])
        for number in range(count):
            file.write(spell(error.replace('"value": 0', f'"value": "sample {number}"'), number))
        file.write(log[-1])
    (folder / SUMMARY).write_bytes((originals() / SUMMARY).read_bytes())
    assert (folder / DETAIL).stat().st_size > 60e6
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from megatoken.audit import audit\n"
        "before = time.process_time()\n"
        "found = audit(Path(sys.argv[1]))\n"
        "status = Path('/proc/self/status').read_text()\n"  # ru_maxrss would count the process that forked this one
        "peak = status.split('VmHWM:')[1].split()[0]\n"
        "print(time.process_time() - before, peak, found.evidence.runs[0].figures.errors)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, str(folder)]
    seconds, kibibytes, errors = subprocess.check_output(command, env=environment, text=True).split()
    assert int(errors) == count
    assert int(kibibytes) < 300 * 1024
    assert (folder / DETAIL).stat().st_size / float(seconds) > 20e6  # 50 MB/s and more when nothing else runs


def test_lines_and_keys_without_end(tmp_path):
    path = tmp_path / DETAIL
    entry = (
        ':::MLLOG {"key": "k%d", "value": %s, "time_ms": 1.000000, "namespace": "mlperf::logging", "event_type": '
        '"POINT_IN_TIME", "metadata": {"is_error": false, "is_warning": false, "file": "a.cc", "line_no": 1, '
        '"pid": %d, "tid": %d}}\n'
    )
    with path.open("w") as file:
        file.write(":::MLLOG " + "x" * 40 * 2**20 + "\n")
        file.writelines(entry % (n, "[" + ",".join(["[]"] * 20) + "]", n, n) for n in range(20_000))
        file.write(entry % (1, "[" + ",".join(["7"] * 3_000_000) + "]", 1, 1))
    log = read_detail_log(path)
    assert log.lines == 20_002
    assert len(log.first) <= 5_000
    assert "more than 16 MiB" in log.damages[0].what
    examined(tmp_path)


def test_errors_of_the_program_become_findings(twin, monkeypatch):
    def broken(_):
        raise ZeroDivisionError("never")

    monkeypatch.setattr("megatoken.audit.examine.RUN_CHECKS", (broken,))
    found = [item for item in audit(twin()).findings if item.id == "log.examined"]
    assert found[0].severity is Severity.UNKNOWN
    assert "ZeroDivisionError" in found[0].found


def test_every_error_is_typed():
    assert issubclass(UsageError, MegatokenError)
    assert not issubclass(UnreadableError, MegatokenError)  # never leaves the audit


def test_no_pattern_takes_long(twin, tmp_path):
    """Texts on which a careless pattern would search for hours."""
    folder = twin(name="results")
    long = 100_000
    for text in (
        " " * long,
        "9" * long,
        "a " * long,
        "1.1" * long,
        "a: b\n" * long,
        "9 " * long,
        '"a" ' * long,
        "x." * long,
    ):
        (folder / SUMMARY).write_text(text)
        (folder / "user.conf").write_text(f"a.b.c = {text}\n{text}")
        (folder / "accuracy.txt").write_text(text)
        for name, content in (
            (
                "systems/one.json",
                json.dumps(
                    dict.fromkeys(
                        (
                            "hw_notes",
                            "host_memory_capacity",
                            "host_memory_configuration",
                            "accelerator_memory_capacity",
                            "accelerator_model_name",
                            "framework",
                            "accelerators_per_node",
                        ),
                        text,
                    )
                ),
            ),
            ("configs/one.py", text),
            ("configs/one.yaml", text[: 2**16]),
            ("README.md", f"CUDA {text}"),
        ):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        before = time.process_time()
        examined(tmp_path)
        assert time.process_time() - before < 5, text[:10]
