"""Single files and plain values."""

import errno
import json
import math
import os
import re
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.errors import StorageError
from megatoken.files import plain, redact, storage_error, to_json, write_atomically, write_text


class Colour(StrEnum):
    RED = "red"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=3))
def test_everything_plain_survives_json(value):
    assert json.loads(to_json(value)) == plain(value)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc_", min_size=1), st.none() | st.booleans() | st.integers() | st.floats()))
def test_everything_plain_survives_yaml(value):
    assert yaml.safe_load(yaml.safe_dump(plain(value))) == plain(value)


def test_foreign_types_become_plain():
    value = {
        1: (Path("/a/b"), Colour.RED),
        "n": np.float32(0.5),
        "i": np.int64(3),
        "nan": math.inf,
        "b": np.bool_(True),
    }
    result = plain(value)
    assert result == {"1": ["/a/b", "red"], "n": 0.5, "i": 3, "nan": None, "b": True}
    assert {type(item) for item in (*result["1"], result["n"], result["i"], result["b"])} == {str, float, int, bool}
    with pytest.raises(TypeError, match="no place in a run folder"):
        plain({"x": object()})


@pytest.mark.parametrize(
    "key", ["password", "hf_token", "token", "API_KEY", "apikey", "client_secret", "authorization"]
)
def test_redaction_knows_secrets_by_their_key(key):
    assert redact({"a": [{key: "x"}]}) == {"a": [{key: "***"}]}


@pytest.mark.parametrize("key", ["max_tokens", "token_ids", "tokenizer", "cache_tokens", "secretary", "keys"])
def test_redaction_leaves_the_rest(key):
    assert redact({key: "x", "n": [1, None, True]}) == {key: "x", "n": [1, None, True]}


def test_a_failed_write_keeps_the_old_file_and_no_scrap(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, lambda path: path.write_text("old"))

    def fail(path: Path) -> None:
        path.write_text("new, but only ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, fail)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("special", ["folder", "pipe", "link to a pipe", "root", "here"])
def test_what_is_no_regular_file_is_never_replaced(tmp_path, monkeypatch, special):
    """A rename over /dev/null would leave a file in its place. Pipes stand for devices, which only root can make."""
    monkeypatch.chdir(tmp_path)
    path = {"root": Path("/"), "here": Path()}.get(special, tmp_path / "target")
    if special == "folder":
        path.mkdir()
    elif special == "pipe":
        os.mkfifo(path)
    elif special == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    before = path.stat().st_mode
    with pytest.raises(StorageError, match=f"^{re.escape(str(path))}: not a regular file; name another$"):
        write_atomically(path, lambda _: pytest.fail("nothing may be written"))
    assert path.stat().st_mode == before


def test_a_link_stays_one(tmp_path):
    real, link = tmp_path / "folder" / "real", tmp_path / "link"
    real.parent.mkdir()
    link.symlink_to(real)
    for text in ("made", "made anew"):
        write_text(link, text)
        assert link.is_symlink()
        assert real.read_text() == text


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EIO])
def test_another_folder_is_the_mend_where_room_is_none(tmp_path, number):
    message = str(storage_error(tmp_path, OSError(number, "")))
    assert message.startswith(f"{tmp_path}: cannot be written (")
    assert message.endswith("; choose another folder with --out")
    assert "room" not in message


def test_a_full_disk_needs_room(tmp_path):
    with pytest.raises(StorageError, match=r"\(No space left on device\); make room or choose another folder"):
        write_atomically(tmp_path / "file", lambda _: Path("/dev/full").write_text("x"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.ENOENT])
def test_no_flag_is_named_that_the_command_lacks(tmp_path, number):
    with pytest.raises(StorageError, match=r"cannot be written \(.+\); \w+") as caught:
        write_atomically(tmp_path / "file", lambda _: (_ for _ in ()).throw(OSError(number, "")), movable=False)
    assert "--out" not in str(caught.value)
    assert "--out" not in str(storage_error(tmp_path, OSError(errno.EFBIG, "")))


def test_a_missing_folder_and_a_file_in_its_place_need_another(tmp_path):
    (tmp_path / "file").write_text("")
    for path, cause in ((tmp_path / "none" / "x", "No such file"), (tmp_path / "file" / "x", "Not a directory")):
        with pytest.raises(StorageError, match=f"{cause}.*; choose another folder with --out"):
            write_text(path, "x")


@settings(deadline=None)
@given(st.text(alphabet=st.characters()), st.text(alphabet=st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF)))
def test_what_utf8_has_no_code_for_is_written_as_an_escape(tmp_path_factory, text, halves):
    path = tmp_path_factory.mktemp("odd") / "document.json"
    write_text(path, to_json({f"{text}{halves}": [Path(f"a{halves}"), halves]}))
    ((key, values),) = json.loads(path.read_text(encoding="utf-8")).items()
    assert len(values[1]) == 6 * len(halves)
    assert values[0] == f"a{values[1]}"
    assert key.endswith(values[1])
