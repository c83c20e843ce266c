"""The pickle reader agrees with pandas on what pandas writes, and nothing in a hostile file ever runs."""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import os
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy._core.multiarray import _reconstruct
from pandas._libs.internals import _unpickle_block
from pandas.core.indexes.base import _new_Index
from pandas.core.internals.managers import BlockManager

from examples import examples
from megatoken.datasets.dataframe_pickle import Record, read_columns, unpickle
from megatoken.errors import DatasetError

GOLDEN = Path(__file__).parents[1] / "data" / "openorca_pickles"
_SPEC = importlib.util.spec_from_file_location("make", GOLDEN / "make.py")
_MAKE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MAKE)
ROWS = _MAKE.ROWS
COLUMNS = list(ROWS[0])
GOLDEN_FILES = sorted(GOLDEN.glob("*.pkl"))


def plain(cell: object) -> object:
    """A cell as values that compare with ==, every kind of missing being None."""
    if isinstance(cell, np.ndarray):
        return cell.dtype.str, cell.tolist()
    if cell is None or cell is pd.NA or (isinstance(cell, float) and cell != cell):
        return None
    return type(cell), cell


def pickled(frame: object, tmp_path: Path, protocol: int = 4) -> bytes:
    path = tmp_path / "frame.pkl"
    frame.to_pickle(path, protocol=protocol)
    return path.read_bytes()


def refused(data: bytes, columns: tuple[str, ...] = ("tok_input",)) -> str:
    with pytest.raises(DatasetError) as caught:
        read_columns(data, columns, "table.pkl")
    message = str(caught.value)
    assert message.startswith("table.pkl: ")
    assert "nothing was executed" in message
    assert "\n" not in message
    assert len(message) < 400
    return message


# --- what pandas writes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_tables_of_every_pandas_age_are_read(path: Path) -> None:
    columns = read_columns(path.read_bytes(), COLUMNS, path.name)
    assert sorted(columns) == sorted(COLUMNS)
    for name in COLUMNS:
        assert [plain(cell) for cell in columns[name]] == [plain(row[name]) for row in ROWS]


def test_there_are_golden_tables_of_all_layouts() -> None:
    versions = {path.name.split("-")[1].rsplit(".", 1)[0] for path in GOLDEN_FILES}
    assert versions >= {"0.25", "1.0", "1.2", "1.3", "1.5", "2.2", "2.3", "3.0", "3.1"}


def _frames() -> dict[str, pd.DataFrame]:
    base = pd.DataFrame(ROWS * 3)
    arrays = base.copy()
    arrays["tok_input"] = [np.array(ids, dtype=np.int32) for ids in base["tok_input"]]
    arrays["tok_output"] = [np.array(ids, dtype=np.uint16)[::-1] for ids in base["tok_output"]]
    numbers = base.assign(half=np.float16(0.5), flag=True, small=np.arange(9, dtype=np.int8))
    fortran = pd.DataFrame(np.arange(12).reshape(4, 3), columns=["one", "two", "three"])
    fortran.insert(1, "tok_input", pd.Series([[1], [2, 3], [], [4]]))
    big_endian = pd.DataFrame({"tok_input": [[1], [2]], "count": np.array([1, 258], dtype=">i4").astype("=i4")})
    return {
        "as made": base,
        "arrays in cells": arrays,
        "shuffled": base.sample(frac=1, random_state=3),
        "sliced": base.iloc[2:7],
        "every other row": base.iloc[::2],
        "columns reversed": base[base.columns[::-1]],
        "concatenated": pd.concat([base, base.iloc[:2]]),
        "many blocks": base.assign(extra=1, more=2.5).drop(columns="question"),
        "named index": base.set_index("id"),
        "object rows": pd.DataFrame(base.to_numpy(), columns=base.columns),
        "python strings": base.astype(
            {"question": pd.StringDtype("python"), "system_prompt": pd.StringDtype("python")}
        ),
        "arrow strings": base.astype({"question": pd.StringDtype("pyarrow")}),
        "object strings": base.astype({"question": object, "system_prompt": object}),
        "number types": numbers,
        "fortran order": fortran,
        "small integers": big_endian,
        "one row": base.iloc[:1],
        "no rows": base.iloc[:0],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", _frames())
def test_agrees_with_pandas(kind: str, protocol: int, tmp_path: Path) -> None:
    frame = _frames()[kind]
    if list(frame.index) != list(range(len(frame))):
        with pytest.raises(DatasetError, match="missing, doubled or out of order"):
            read_columns(pickled(frame, tmp_path, protocol), [], "table.pkl")
        frame = frame.reset_index(drop=True)
    columns = read_columns(pickled(frame, tmp_path, protocol), list(frame.columns), "table.pkl")
    assert sorted(columns) == sorted(frame.columns)
    for name in frame.columns:
        assert [plain(cell) for cell in columns[name]] == [plain(cell) for cell in frame[name].tolist()]


def test_reads_what_pandas_with_default_protocol_wrote_through_pickle_dump(tmp_path: Path) -> None:
    data = pickle.dumps(pd.DataFrame(ROWS))
    assert read_columns(data, ["tok_input"], "table.pkl")["tok_input"] == [row["tok_input"] for row in ROWS]


def test_only_wanted_columns_come_back(tmp_path: Path) -> None:
    assert list(read_columns(pickled(pd.DataFrame(ROWS), tmp_path), ["origin", "absent"], "t")) == ["origin"]


def test_out_of_band_buffers_and_other_objects_are_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame(ROWS)
    assert "0x97" in refused(pickle.dumps(frame, protocol=5, buffer_callback=lambda buffer: None))
    assert "pandas" in refused(pickled(frame.astype({"origin": "category"}), tmp_path))
    assert "holds no DataFrame" in refused(pickle.dumps({"tok_input": [[1]]}))
    assert "holds no DataFrame" in refused(pickle.dumps([1, 2, 3]))
    assert "pandas" in refused(pickle.dumps(pd.Series([1, 2])))
    assert "no names" in refused(pickle.dumps(pd.DataFrame([[1, 2]])))


def test_text_protocols_are_refused_with_the_reason() -> None:
    for protocol in (0, 1):
        assert "protocol 2 to 5" in refused(pickle.dumps(pd.DataFrame(ROWS), protocol=protocol))


# --- plain values, against Python's own unpickler ---------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**127), 2**127 - 1)
    | st.integers(-(2**17), 2**17)
    | st.floats(allow_nan=False)
    | st.text()
    | st.text(min_size=250, max_size=260),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


@settings(deadline=None)
@given(VALUES, st.integers(2, 5))
def test_plain_values_come_back_as_pickle_reads_them(value: object, protocol: int) -> None:
    assert unpickle(pickle.dumps(value, protocol), "file") == value


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(3, 5))
def test_bytes_come_back(value: bytes, protocol: int) -> None:
    assert bytes(unpickle(pickle.dumps([value] * 2, protocol), "file")[1]) == value


@settings(deadline=None)
@given(st.lists(st.integers(-300, 2**31 - 1) | st.sampled_from([0, 255, 256, 65535, 65536, -1]), max_size=2500))
def test_long_lists_of_integers_come_back(value: list[int]) -> None:
    assert unpickle(pickle.dumps(value, 4), "file") == value


def test_shared_and_self_containing_lists_keep_their_identity() -> None:
    loop: list[object] = []
    loop.append(loop)
    tree = unpickle(pickle.dumps([loop, loop]), "file")
    assert tree[0] is tree[1]
    assert tree[0][0] is tree[0]


def test_a_call_is_recorded_and_not_made() -> None:
    tree = unpickle(pickle.dumps(slice(1, 2)), "file")
    assert isinstance(tree, Record)
    assert (tree.name, tree.arguments, tree.state) == ("slice", (1, 2, None), None)


# --- hostile files ----------------------------------------------------------------------------------------------------


class Built:
    """Pickles as "call this with these arguments, then set this state": how pickles work and how they attack."""

    def __init__(self, function: Callable[..., object], *arguments: object, state: object = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value.encode())]) + value.encode()


def _attacks(canary: Path) -> dict[str, tuple[bytes, str]]:
    """Name -> (file, what the refusal must name). All but the last few work on Python's own unpickler."""
    touch = f"touch {canary}"
    python = f"open({str(canary)!r}, 'w').close()"
    frame = pd.DataFrame({"tok_input": [[1], [2]]})
    cell = frame.copy()
    cell.at[1, "tok_input"] = Built(os.system, touch)
    attributes = frame.copy()
    attributes.attrs["x"] = Built(os.system, touch)
    inner = pickle.dumps(Built(os.system, touch))
    return {
        "system": (pickle.dumps(Built(os.system, touch)), "posix.system"),
        "system, text opcode": (
            b"\x80\x02cos\nsystem\nX" + struct.pack("<I", len(touch)) + touch.encode() + b"\x85R.",
            "os.system",
        ),
        "popen": (pickle.dumps(Built(subprocess.check_output, ["touch", str(canary)])), "subprocess.check_output"),
        "eval": (pickle.dumps(Built(eval, python)), "builtins.eval"),
        "exec": (pickle.dumps(Built(exec, python)), "builtins.exec"),
        "open": (pickle.dumps(Built(open, str(canary), "w")), "open"),
        "getattr": (_getattr_attack(touch), "builtins.getattr"),
        "import": (pickle.dumps(Built(__import__, "os")), "builtins.__import__"),
        "touch": (pickle.dumps(Built(Path.touch, canary)), "pathlib.Path.touch"),
        "pickle in pickle": (pickle.dumps(Built(pickle.loads, inner)), "loads"),
        "read_pickle": (pickle.dumps(Built(pd.read_pickle, "/nowhere.pkl")), "pandas.read_pickle"),
        "numpy load": (pickle.dumps(Built(np.load, "/nowhere.npy", None, True)), "load"),
        "numpy memmap": (pickle.dumps(Built(np.memmap, str(canary), "int8", "w+", 0, 1)), "numpy.memmap"),
        "numpy fromfile": (pickle.dumps(Built(np.fromfile, "/etc/hostname")), "fromfile"),
        "cell of a frame": (pickle.dumps(cell), "posix.system"),
        "attributes of a frame": (pickle.dumps(attributes), "posix.system"),
        "state of an allowed type": (pickle.dumps(Built(np.dtype, "O", state=Built(os.system, touch))), "posix.system"),
        "argument of a call": (pickle.dumps(Built(max, Built(os.system, touch), 1)), "builtins.max"),
        "dotted name": (_stack_global("pandas", "io.common.os.system", touch), "pandas.io.common.os.system"),
        "dotted allowed name": (
            _stack_global("pandas", "DataFrame.to_pickle", str(canary)),
            "pandas.DataFrame.to_pickle",
        ),
        "allowed name, other module": (_stack_global("os", "DataFrame", touch), "os.DataFrame"),
        "split elsewhere": (_stack_global("pandas.core", "frame.DataFrame", touch), "pandas.core.frame.DataFrame"),
        "line break in the name": (_stack_global("os", "sys\ntem", touch), r"os.sys\ntem"),
        "partial of system": (
            b"\x80\x04" + _global("functools", "partial") + _global("os", "system") + b"\x85R)R.",
            "os.system",
        ),
        "instance opcode": (b"\x80\x02(X" + struct.pack("<I", len(touch)) + touch.encode() + b"ios\nsystem\n.", "0x69"),
        "object opcode": (b"\x80\x02(cos\nsystem\no.", "os.system"),
        "extension": (b"\x80\x02\x82\x01.", "0x82"),
        "persistent id, text": (b"\x80\x02Pos.system\n.", "0x50"),
        "persistent id, binary": (b"\x80\x02NQ.", "0x51"),
        "keyword construction": (b"\x80\x04" + _global("builtins", "slice") + b")}\x92.", "0x92"),
        "state on a list": (b"\x80\x02]}b.", "damaged"),
        "state twice": (b"\x80\x02cbuiltins\nslice\n)RNb}b}b.", "damaged"),
        "allowed call as a file writer": (
            b"\x80\x04" + _global("numpy", "ndarray") + _text(str(canary)) + b"\x85R.",
            "no DataFrame",
        ),
    }


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _stack_global(module: str, name: str, argument: str) -> bytes:
    return b"\x80\x04" + _global(module, name) + _text(argument) + b"\x85R."


def _getattr_attack(touch: str) -> bytes:
    module = _global("builtins", "__import__") + _text("os") + b"\x85R"
    return b"\x80\x04" + _global("builtins", "getattr") + module + _text("system") + b"\x86R" + _text(touch) + b"\x85R."


ATTACKS = list(_attacks(Path("canary")))


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused_by_name_and_leave_no_trace(attack: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data, named = _attacks(canary)[attack]
    message = refused(data)
    assert named in message
    assert not canary.exists()


@pytest.mark.parametrize(
    "attack", ["system", "eval", "popen", "getattr", "cell of a frame", "dotted name", "numpy memmap"]
)
def test_the_attacks_are_real(attack: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle.loads(_attacks(canary)[attack][0])
    assert canary.exists()


def test_no_import_call_or_file_happens_while_reading(tmp_path: Path) -> None:
    """In a process of its own, because an audit hook stays for good."""
    for number, (data, _) in enumerate(_attacks(tmp_path / "canary").values()):
        (tmp_path / f"{number}.pkl").write_bytes(data)
    script = """
import sys
from pathlib import Path
from megatoken.errors import DatasetError
from megatoken.datasets.dataframe_pickle import read_columns
files = [path.read_bytes() for folder in sys.argv[1:] for path in sorted(Path(folder).glob("*.pkl"))]
events, watching = [], False
sys.addaudithook(lambda event, arguments: events.append(event) if watching else None)
results = []
for _ in range(2):  # the first round may load parts of NumPy, the second may do nothing at all
    del events[:], results[:]
    for data in files:
        watching = True
        try:
            results.append(len(read_columns(data, ["tok_input"], "file")))
        except DatasetError:
            results.append(0)
        watching = False
print(sum(results), sorted(set(events) - {"object.__getattr__"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(GOLDEN)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{len(GOLDEN_FILES)} []"


# --- files that claim more than they hold -----------------------------------------------------------------------------


HUGE = struct.pack("<Q", 2**62)
OBJECTS = np.dtype(object)
RAW_BOMBS = {
    "memo slot": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo slot, read": b"\x80\x02j\xff\xff\xff\xff.",
    "frame": b"\x80\x04\x95" + HUGE + b"N.",
    "text": b"\x80\x04\x8d" + HUGE + b"x.",
    "bytes": b"\x80\x04\x8e" + HUGE + b"x.",
    "byte array": b"\x80\x05\x96" + HUGE + b"x.",
    "integer": b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    "integer, long": b"\x80\x02\x8b\x00\x00\x10\x00" + b"\x7f" * 2**20 + b".",
    "global without end": b"\x80\x02c" + b"x" * 10000,
    "deep marks": b"\x80\x02" + b"(" * 10**5,
    "deep tuples": b"\x80\x02)" + b"\x85" * 10**5 + b".",
    "deep tuple as a key": b"\x80\x02})" + b"\x85" * 10**5 + b"Ns.",
    "deep lists": b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
    "deep calls": b"\x80\x02cbuiltins\nslice\n" + b")R" * 10**5 + b".",
    "deep states": b"\x80\x02" + b"cbuiltins\nslice\n)R" * 10**4 + b"b" * (10**4 - 1) + b".",
    "doubling tuples": b"\x80\x04)" + b"\x94h\x00\x86" * 1000 + b".",
    "key that is no text": b"\x80\x02}K\x01K\x02s.",
    "nothing to pop": b"\x80\x020.",
    "nothing to stop with": b"\x80\x02.",
    "nothing to memoize": b"\x80\x04\x94.",
    "tuple of too little": b"\x80\x02N\x86.",
    "items without a mark": b"\x80\x02]e.",
    "items for no list": b"\x80\x02N(NNe.",
    "odd dictionary": b"\x80\x02}(Nu.",
    "surplus memo": b"\x80\x02h\x09.",
    "cut number": b"\x80\x02M\x01",
    "text that is none": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "global of numbers": b"\x80\x04K\x01K\x02\x93.",
    "empty": b"",
    "only a start": b"\x80",
    "protocol 6": b"\x80\x06N.",
    "compressed": b"\x1f\x8b\x08\x00" + b"\x00" * 30,
}


def array(shape: object, dtype: object, payload: object, fortran: bool = False) -> Built:
    return Built(_reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, fortran, payload))


def table(values: object, placement: object = None, names: object = None, blocks: int = 1) -> bytes:
    """A pickled frame of one column, any part of it replaced by something else."""
    placement = slice(0, 1, 1) if placement is None else placement
    names = array((1,), OBJECTS, ["tok_input"]) if names is None else names
    axes = [Built(_new_Index, pd.Index, {"data": names, "name": None}), pd.RangeIndex(2)]
    block = Built(_unpickle_block, values, placement, 2)
    return pickle.dumps(Built(pd.DataFrame, state={"_mgr": Built(BlockManager, (block,) * blocks, axes)}), 4)


def texts(
    length: int, offset: int, validity: bytes | None, offsets: bytes, text: bytes, kind: str = "large_string"
) -> Built:
    buffers = [None if part is None else pa.py_buffer(part) for part in (validity, offsets, text)]
    parts = (Built(pa.lib.type_for_alias, kind), length, 0, offset, buffers, [], None)
    return Built(pd.arrays.ArrowStringArray, state={"_pa_array": Built(pa.lib._restore_array, parts)})


COLUMN = array((1, 2), OBJECTS, [[5, 6], [7]])
NUMBERS = struct.pack("<4q", 0, 1, 2, 3)
LATIN = "x" * 1000
FORGED = {
    "array without content": (table(array((2**50,), OBJECTS, [])), "is malformed"),
    "array of no rows": (table(array((0, 2**50), OBJECTS, [])), "has no row 0"),
    "array of a negative length": (table(array((-1, 2), OBJECTS, [])), "shape is malformed"),
    "array of many dimensions": (table(array((127,) * 10**4, OBJECTS, [])), "shape is malformed"),
    "array of a fractional length": (table(array((1.0, 2), OBJECTS, [1, 2])), "shape is malformed"),
    "array of a true length": (table(array((True, 2), OBJECTS, [1, 2])), "shape is malformed"),
    "array of too few bytes": (table(array((5,), np.dtype("i8"), NUMBERS)), "has 32 bytes"),
    "array of text as bytes": (table(array((2,), np.dtype("i8"), "text")), "is malformed"),
    "array of dates": (table(array((4,), np.dtype("M8[s]"), NUMBERS)), "type"),
    "array of records": (table(array((4,), np.dtype([("a", "i8")]), NUMBERS)), "type"),
    "array without a type": (table(array((4,), None, NUMBERS)), "type is malformed"),
    "array of strings": (table(array((1,), np.dtype("U8"), NUMBERS)), "type 'U8'"),
    "no array": (table("values"), "array is malformed"),
    "block of three axes": (table(array((1, 1, 2), OBJECTS, [1, 2])), "shape is malformed"),
    "step 0": (table(COLUMN, slice(0, 1, 0)), "slice step cannot be zero"),
    "slice of text": (table(COLUMN, Built(slice, "a", "b")), "malformed"),
    "placement outside": (table(COLUMN, np.array([7])), "outside the 1 columns"),
    "placement below": (table(COLUMN, np.array([-1])), "outside the 1 columns"),
    "placement of fractions": (table(COLUMN, np.array([0.0])), "outside the 1 columns"),
    "column twice": (table(COLUMN, blocks=2), "more than its 1 columns"),
    "name twice": (
        table(array((2, 1), OBJECTS, [[1], [2]]), slice(0, 2), array((2,), OBJECTS, ["tok_input"] * 2)),
        "comes twice",
    ),
    "fewer rows of blocks than columns": (
        table(COLUMN, slice(0, 2), array((2,), OBJECTS, ["a", "tok_input"])),
        "has no row 1",
    ),
    "many blocks over many names": (
        table(COLUMN, slice(0, None), array((10**4,), OBJECTS, ["a"] * 10**4), blocks=10**4),
        "more than its 10000 columns",
    ),
    "names that are no index": (table(COLUMN, names=7), "array is malformed"),
    "bytes shared by many cells": (
        table(
            array(
                (1, 1000),
                OBJECTS,
                [array((1000,), np.dtype("i1"), Built(codecs.encode, LATIN, "latin1")) for _ in range(1000)],
            ),
        ),
        "bytes that are malformed or more than the file holds",
    ),
    "bytes beyond Latin-1": (
        table(array((1,), np.dtype("i1"), Built(codecs.encode, "\u20ac", "latin1"))),
        "damaged",
    ),
    "bytes by another codec": (
        table(array((1,), np.dtype("i1"), Built(codecs.encode, "x", "rot13"))),
        "bytes that are malformed",
    ),
    "texts without end": (table(texts(2**50, 0, None, NUMBERS, b"")), "malformed"),
    "texts from nowhere": (table(texts(1, -8, None, NUMBERS, b"abc")), "malformed"),
    "texts short of offsets": (table(texts(9, 0, None, NUMBERS, b"abc")), "malformed"),
    "texts beyond the content": (table(texts(3, 0, None, NUMBERS, b"ab")), "malformed"),
    "texts backwards": (table(texts(1, 0, None, NUMBERS[::-1], b"abc")), "malformed"),
    "texts of half a validity": (table(texts(3, 0, b"", NUMBERS, b"abc")), "malformed"),
    "texts not UTF-8": (table(texts(3, 0, None, NUMBERS, b"a\xffc")), "malformed"),
    "texts of another type": (table(texts(3, 0, None, NUMBERS, b"abc", "binary")), "malformed"),
    "block manager of numbers": (pickle.dumps(Built(pd.DataFrame, state={"_mgr": 7})), "holds no DataFrame"),
    "block of numbers": (
        pickle.dumps(Built(pd.DataFrame, state={"_mgr": Built(BlockManager, (7,), [pd.RangeIndex(1)] * 2)})),
        "malformed",
    ),
    "old block of numbers": (
        pickle.dumps(
            Built(
                pd.DataFrame,
                state={"_data": Built(BlockManager, state=([], [], [], {"0.14.1": {"axes": [1, 2], "blocks": [7]}}))},
            )
        ),
        "malformed",
    ),
}


def affordably_refused(data: bytes) -> str:
    tracemalloc.start()
    start = time.process_time()
    try:
        message = refused(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 10
    assert peak_bytes < 300 * len(data) + 2**19
    return message


@pytest.mark.parametrize("bomb", RAW_BOMBS)
def test_bombs_cost_no_more_than_their_size(bomb: str) -> None:
    affordably_refused(RAW_BOMBS[bomb])


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_tables_are_refused_for_what_is_wrong(forgery: str) -> None:
    data, problem = FORGED[forgery]
    assert problem in affordably_refused(data)


def test_the_forger_forges_well() -> None:
    """The tables above differ from a good one only in what their name says."""
    expected = {"tok_input": [[5, 6], [7]]}
    assert read_columns(table(COLUMN), ["tok_input"], "t") == expected
    assert read_columns(table(COLUMN, slice(0, 2**62)), ["tok_input"], "t") == expected
    assert read_columns(table(COLUMN, np.array([0])), ["tok_input"], "t") == expected
    assert read_columns(table(texts(2, 1, b"\x05", NUMBERS, b"abc")), ["tok_input"], "t") == {"tok_input": [None, "c"]}
    shared = [array((3,), np.dtype("i1"), Built(codecs.encode, "abc", "latin1")) for _ in range(2)]
    cells = read_columns(table(array((1, 2), OBJECTS, shared)), ["tok_input"], "t")["tok_input"]
    assert [cell.tolist() for cell in cells] == [[97, 98, 99]] * 2


# --- damage -----------------------------------------------------------------------------------------------------------

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "copy", "drop"]),
        st.integers(0),
        st.integers(0),
        st.binary(max_size=9),
    ),
    min_size=1,
    max_size=6,
)


def _edited(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    for kind, first, second, extra in edits:
        if not data:
            break
        at, other = first % len(data), second % len(data)
        low, high = min(at, other), max(at, other)
        match kind:
            case "flip":
                data = data[:at] + bytes([data[at] ^ (1 + second % 255)]) + data[at + 1 :]
            case "cut":
                data = data[:at]
            case "insert":
                data = data[:at] + extra + data[at:]
            case "copy":
                data = data[:high] + data[low : low + 40] + data[high:]
            case "drop":
                data = data[:low] + data[min(high, low + 20) :]
    return data


@settings(max_examples=examples(800), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([path.read_bytes() for path in GOLDEN_FILES]), EDITS)
def test_a_damaged_table_is_read_or_refused(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> None:
    with contextlib.suppress(DatasetError):
        columns = read_columns(_edited(data, edits), COLUMNS, "table.pkl")
        assert columns.keys() <= set(COLUMNS)


@settings(max_examples=examples(500), deadline=None)
@given(st.binary(max_size=200))
@example(b"\x80\x04")
@example(b"\x80\x02]K\x01a]b.")
def test_random_bytes_are_refused(data: bytes) -> None:
    for prefix in (b"", b"\x80\x04"):
        with pytest.raises(DatasetError):
            read_columns(prefix + data, COLUMNS, "table.pkl")


OPCODES = st.sampled_from(
    [
        bytes([code])
        for code in b"NKMJG(]})tesaubcqrhjRC.X\x80\x85\x86\x87\x88\x89\x8a\x8c\x93\x94\x95\x81\x96\x0201iQPV"
    ]
    + [_text(name) for name in ("pandas", "DataFrame", "_mgr", "numpy", "ndarray", "data", "0.14.1")]
    + [_global("pandas", "DataFrame"), _global("numpy", "dtype"), b"K\x01", b"q\x01", b"h\x01", b"\x85R", b"}b"]
)


@settings(max_examples=examples(800), deadline=None)
@given(st.lists(OPCODES, max_size=60).map(b"".join))
def test_random_opcodes_are_refused(data: bytes) -> None:
    with pytest.raises(DatasetError):
        read_columns(b"\x80\x04" + data, COLUMNS, "table.pkl")
