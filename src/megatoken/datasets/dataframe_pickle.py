"""Columns of a pickled pandas DataFrame, read without pandas and without running anything that the file names.

Reads the layouts that ``DataFrame.to_pickle`` writes with protocols 2 to 5: pandas 0.25 to 1.2 (block manager state),
1.3 to 2.x (block constructors) and 3.x (text as ``StringArray`` or Arrow buffers), with NumPy 1 or 2.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.errors import DatasetError

_ALLOWED = {  # "module:name" in the file -> the name of its stand-in
    place: line.split()[0]
    for line in """
        DataFrame pandas.core.frame:DataFrame pandas:DataFrame
        BlockManager pandas.core.internals.managers:BlockManager
        block pandas._libs.internals:_unpickle_block pandas.core.internals.blocks:new_block functools:partial
        new_Index pandas.core.indexes.base:_new_Index
        Index pandas.core.indexes.base:Index pandas:Index pandas.core.indexes.range:RangeIndex pandas:RangeIndex
        Index pandas.core.indexes.numeric:Int64Index
        NA pandas._libs.missing:NA pandas:NA
        StringDtype pandas.core.arrays.string_:StringDtype pandas:StringDtype
        StringArray pandas.core.arrays.string_:StringArray pandas.arrays:StringArray
        NDArrayBacked pandas._libs.arrays:__pyx_unpickle_NDArrayBacked
        ArrowStringArray pandas.core.arrays.string_arrow:ArrowStringArray pandas.arrays:ArrowStringArray
        arrow_array pyarrow.lib:_restore_array
        arrow_type pyarrow.lib:type_for_alias
        bytes pyarrow.lib:py_buffer _codecs:encode
        bytes builtins:bytes builtins:bytearray __builtin__:bytes __builtin__:bytearray
        ndarray numpy:ndarray
        dtype numpy:dtype
        reconstruct numpy.core.multiarray:_reconstruct numpy._core.multiarray:_reconstruct
        frombuffer numpy.core.numeric:_frombuffer numpy._core.numeric:_frombuffer
        slice builtins:slice __builtin__:slice
    """.strip().splitlines()
    for place in line.split()[1:]
}
_NUMBER_TYPES = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
_LONGEST_SHOWN = 80


class Record:
    """Stand-in for everything that a file names or asks to build: keeps the arguments and the state, runs nothing."""

    __match_args__ = ("name", "arguments", "state")
    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[object, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.state: object = None


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(
            f"opcode 0x{opcode:02x} is not one that DataFrame.to_pickle writes (protocols 2 to 5)"
        )


_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """The standard library's unpickler with the opcodes that a table needs and records in place of all objects.

    It is the one in Python: the one in C reserves memory for any memo slot that a file names, and hashes any dictionary
    key, however deep it is nested. This one takes memory in proportion to the file.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stream = io.BytesIO(data)
        self.integers: dict[int, int] = {}
        self.encoded_bytes = 0
        super().__init__(self.stream)

    def find_class(self, module: str, name: str) -> object:
        """A record in place of what the file names. UnpicklingError if no table needs it."""
        stand_in = _ALLOWED.get(f"{module}:{name}")
        if stand_in is None:
            raise pickle.UnpicklingError(
                f"the pickle asks for {f'{module}.{name}'[:_LONGEST_SHOWN]!a}, which a plain table does not need; "
                "do not open it with pandas or pickle but fetch it again from its publisher"
            )
        return None if stand_in == "NA" else Record(stand_in)

    def _call(self) -> None:
        arguments, target = self.stack.pop(), self.stack.pop()
        if not isinstance(target, Record) or type(arguments) is not tuple:
            raise ValueError("a call of something else than an allowed name")
        self.append(self._bytes(arguments) if target.name == "bytes" else Record(target.name, arguments))

    def _bytes(self, arguments: tuple[object, ...]) -> bytes:
        """Bytes as protocols 2 and up write them: themselves, or a text of Latin-1 characters to encode."""
        match arguments:
            case ():
                return b""
            case (bytes(content),):
                return content
            case (str(text), "latin1" | "latin-1"):
                self.encoded_bytes += len(text)
                if self.encoded_bytes <= len(self.data):
                    return text.encode("latin-1")
        raise pickle.UnpicklingError("bytes that are malformed or more than the file holds")

    def _set_state(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record) or record.state is not None:
            raise ValueError("a state of something else than a record without one")
        record.state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise ValueError("items of something else than a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:  # only text has a hash that cannot recurse
                raise pickle.UnpicklingError(f"a dictionary key of type {type(key).__name__}; a table has text keys")
            target[key] = value

    def _read_integers(self) -> None:
        """Reads a run of integers: token lists are nearly all of a file, so equal values share one object."""
        data, at, push, share = self.data, self.stream.tell() - 1, self.append, self.integers.setdefault
        while True:
            opcode = data[at]
            if opcode == 0x4D:  # BININT2
                value = data[at + 1] | data[at + 2] << 8
                at += 3
            elif opcode == 0x4B:  # BININT1
                value = data[at + 1]
                at += 2
            elif opcode == 0x4A:  # BININT
                value = int.from_bytes(data[at + 1 : at + 5], "little", signed=True)
                at += 5
            else:
                break
            push(share(value, value))
        self.stream.seek(at)

    def _skip_frame(self) -> None:
        self.read(8)  # its length, a hint for buffered reading

    dispatch = _Opcodes(
        {
            getattr(pickle, opcode)[0]: _PythonUnpickler.dispatch[getattr(pickle, opcode)[0]]
            for opcode in (
                *("PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "LONG1", "BINFLOAT", "BINUNICODE"),
                *("SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "EMPTY_LIST", "APPEND"),
                *("APPENDS", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "GLOBAL"),
                *("STACK_GLOBAL", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
            )
        }
        | dict.fromkeys((pickle.REDUCE[0], pickle.NEWOBJ[0]), _call)
        | dict.fromkeys((pickle.BININT[0], pickle.BININT1[0], pickle.BININT2[0]), _read_integers)
        | {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items, pickle.BUILD[0]: _set_state}
        | {pickle.FRAME[0]: _skip_frame, pickle.BYTEARRAY8[0]: _PythonUnpickler.load_binbytes8}
    )


def unpickle(data: bytes, file: str) -> object:
    """What a pickle holds: plain values, and a ``Record`` for everything else.

    Raises:
        DatasetError: Not a pickle of protocol 2 to 5, damaged, or it names something that a plain table does not need.
    """
    if not data.startswith(b"\x80"):
        raise DatasetError(
            f"{file}: not a pickle of protocol 2 to 5; nothing was executed; write it with DataFrame.to_pickle"
        )
    unpickler = _Unpickler(data)
    problem = "not a pickle, or a damaged one: fetch the file again"
    try:
        return unpickler.load()
    except pickle.UnpicklingError as error:
        problem = str(error)
    except EOFError:
        problem = "the file ends early: fetch it again"
    except Exception:  # whatever the unpickler meets in a damaged file
        pass
    raise DatasetError(f"{file}: byte {unpickler.stream.tell()}: {problem}; nothing was executed")


def read_columns(data: bytes, wanted: Collection[str], file: str) -> dict[str, list[object]]:
    """Returns those of the ``wanted`` columns that the table has, by name; ``file`` is its name in an error.

    A cell is ``None``, bool, int, float (NaN may stand for missing text), str, list, or a 1-D array of numbers (maybe a
    read-only view of ``data``); anything else in it is inert.

    Raises:
        DatasetError: As ``unpickle``; or the file holds no DataFrame, or its row labels are not 0, 1, 2 and so on.
    """
    tree = unpickle(data, file)
    try:
        cells, labels = _columns(tree, wanted)
    except Exception as error:  # records are inert, so whatever fails here is a table of another form
        problem = " ".join(str(error).split())[:_LONGEST_SHOWN] if type(error) is ValueError else "it is malformed"
        raise DatasetError(
            f"{file}: not a table as DataFrame.to_pickle writes it: {problem}; nothing was executed; fetch it again"
        ) from None
    for row, label in enumerate(labels):
        if label != row:
            shown = ascii(label)[:40] if isinstance(label, str | int | float) else type(label).__name__
            raise DatasetError(
                f"{file}: row {row} is labelled {shown}: rows are missing, doubled or out of order, so a sample index "
                "names no single row; fetch the file again, or relabel the rows with reset_index(drop=True)"
            )
    return cells


def _columns(tree: object, wanted: Collection[str]) -> tuple[dict[str, list[object]], Sequence[object]]:
    """The cells of the wanted columns by name, and the labels of the rows; of a range, the first two."""
    match tree:
        case Record("DataFrame", _, {"_mgr": Record("BlockManager") as manager} | {"_data": manager}):
            pass
        case _:
            raise ValueError("it holds no DataFrame")
    match manager:
        case Record("BlockManager", (tuple(blocks), [columns, labels])):
            parts = [block.arguments[:2] for block in blocks]
        case Record("BlockManager", _, (*_, {"0.14.1": {"axes": [columns, labels], "blocks": blocks}})):
            parts = [(block["values"], block["mgr_locs"]) for block in blocks]
        case _:
            raise ValueError("its block manager is malformed")
    match columns:
        case Record("new_Index", (_, {"data": values})):
            names = _column(values, 0)
        case _:
            raise ValueError("its columns have no names")
    cells: dict[str, list[object]] = {}
    placed = 0
    for values, placement in parts:
        positions = _positions(placement, len(names))
        placed += len(positions)
        if placed > len(names):
            raise ValueError(f"its blocks hold more than its {len(names)} columns")
        for row, position in enumerate(positions):
            name = names[position]
            if isinstance(name, str) and name in wanted:
                if name in cells:
                    raise ValueError(f"column {name} comes twice")
                cells[name] = _column(values, row)
    match labels:
        case Record("new_Index", (_, {"data": values})):
            return cells, _column(values, 0)
        case Record("new_Index", (_, {"start": int(first), "step": int(step)})):
            return cells, (first, first + step)
    raise ValueError("its rows have no labels")


def _positions(placement: object, columns: int) -> list[int]:
    """The columns that a block holds, by position."""
    match placement:
        case Record("slice", (int() | None as start, int() | None as stop, int() | None as step)):
            return list(range(columns)[start:stop:step])
    cells = _column(placement, 0)
    positions = [cell for cell in cells if isinstance(cell, int) and 0 <= cell < columns]
    if len(positions) < len(cells):
        raise ValueError(f"a block lies outside the {columns} columns")
    return positions


def _column(values: object, row: int) -> list[object]:
    """Row ``row`` of a block's values, [columns of the block, rows of the table] or [rows of the table]."""
    match values:
        case Record("ArrowStringArray", _, {"_pa_array": array} | {"_data": array}):
            return _arrow_texts(array)
        case Record("StringArray", _, {"_ndarray": array}) | Record(
            "NDArrayBacked", _, (Record("StringDtype"), array, *_) | (array, Record("StringDtype"), *_)
        ):
            values = array
    grid = np.atleast_2d(_array(values))
    if row >= len(grid):
        raise ValueError(f"a block of shape {grid.shape} has no row {row}")
    return [_array(cell) if isinstance(cell, Record) else cell for cell in grid[row].tolist()]


def _array(node: object) -> NDArray[Any]:
    """A NumPy array of one or two axes, of objects or of numbers."""
    match node:
        case Record("frombuffer", (payload, dtype, tuple(shape), "C" | "F" as order)):
            pass
        case Record("reconstruct", _, (int(), tuple(shape), dtype, bool(fortran), payload)):
            order = "F" if fortran else "C"
        case _:
            raise ValueError("an array is malformed")
    if len(shape) not in (1, 2) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("an array's shape is malformed")
    match dtype:
        case Record("dtype", (str(code), *_), (_, "<" | ">" | "|" | "=" as byte_order, *_)):
            pass
        case _:
            raise ValueError("an array's type is malformed")
    if code in ("O8", "O4") and isinstance(payload, list) and len(payload) == prod(shape):
        objects = np.empty(len(payload), object)
        for position, item in enumerate(payload):
            objects[position] = item
        return objects.reshape(shape)
    if code not in _NUMBER_TYPES or not isinstance(payload, bytes):
        raise ValueError(f"an array of type {code[:20]!a} is malformed or not supported")
    if len(payload) != prod(shape) * int(code[1:]):
        raise ValueError(f"an array of shape {shape} has {len(payload)} bytes")
    return np.frombuffer(payload, byte_order + code).reshape(shape, order=order)


def _arrow_texts(array: object) -> list[object]:
    import pyarrow as pa

    match array:
        case Record("arrow_array", ((Record("arrow_type", (str(kind),)), length, _, offset, [*buffers], *_),)):
            content = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
            types = {"string": pa.string(), "large_string": pa.large_string()}
            if not isinstance(offset, int) or offset < 0:  # Arrow would read what lies before its buffers
                raise ValueError("a text column is malformed")
            texts = pa.Array.from_buffers(types[kind], length, content, offset=offset)
            texts.validate(full=True)
            cells: list[object] = texts.to_pylist()
            return cells
    raise ValueError("a text column is malformed")
