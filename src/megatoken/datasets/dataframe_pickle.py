"""Takes columns out of a pickled pandas DataFrame without pandas and without executing the pickle.

The layouts are those ``DataFrame.to_pickle`` writes: pandas 0.25 to 1.2 (block manager state), 1.3 to 2.x (block
constructors) and 3.x (text as ``StringArray`` or Arrow buffers), with NumPy 1 or 2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.pickle_reader import Call, Global, parse_pickle
from megatoken.errors import DatasetError

_ALLOWED = {
    (module, attribute): name
    for name, places in {
        "DataFrame": ["pandas.core.frame DataFrame", "pandas DataFrame"],
        "BlockManager": ["pandas.core.internals.managers BlockManager"],
        "block": [
            "pandas._libs.internals _unpickle_block",
            "pandas.core.internals.blocks new_block",
            "functools partial",
        ],
        "new_Index": ["pandas.core.indexes.base _new_Index"],
        "Index": [
            "pandas.core.indexes.base Index",
            "pandas Index",
            "pandas.core.indexes.range RangeIndex",
            "pandas RangeIndex",
            "pandas.core.indexes.numeric Int64Index",
        ],
        "NA": ["pandas._libs.missing NA", "pandas NA"],
        "StringDtype": ["pandas.core.arrays.string_ StringDtype", "pandas StringDtype"],
        "StringArray": ["pandas.core.arrays.string_ StringArray", "pandas.arrays StringArray"],
        "NDArrayBacked": ["pandas._libs.arrays __pyx_unpickle_NDArrayBacked"],
        "ArrowStringArray": [
            "pandas.core.arrays.string_arrow ArrowStringArray",
            "pandas.arrays ArrowStringArray",
        ],
        "arrow_array": ["pyarrow.lib _restore_array"],
        "arrow_type": ["pyarrow.lib type_for_alias"],
        "arrow_buffer": ["pyarrow.lib py_buffer"],
        "ndarray": ["numpy ndarray"],
        "dtype": ["numpy dtype"],
        "reconstruct": ["numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"],
        "frombuffer": ["numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer"],
        "bytes": [
            "_codecs encode",
            "builtins bytes",
            "builtins bytearray",
            "__builtin__ bytes",
            "__builtin__ bytearray",
        ],
        "slice": ["builtins slice", "__builtin__ slice"],
    }.items()
    for module, attribute in (place.split() for place in places)
}
_NUMBER_TYPES = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
_ARROW_OFFSET_TYPES = {"string": "<i4", "large_string": "<i8"}


def read_columns(data: bytes, wanted: Collection[str], file: str) -> dict[str, list[object]]:
    """Returns those of the wanted columns that the table has, row by row.

    Args:
        data: The whole file.
        wanted: Column names.
        file: What to call the file in an error.

    Returns:
        Column name -> cells. A cell is ``None``, bool, int, float (NaN may stand for missing text), str, list, or a 1-D
        array of numbers (maybe a read-only view of ``data``); anything else in it is inert.

    Raises:
        DatasetError: The file is damaged, no pickled DataFrame, asks for anything a plain table does not need, or its
            row labels are not 0, 1, 2 and so on.
    """
    return _Table(parse_pickle(data, _ALLOWED, file), len(data), file).read(wanted)


class _Table:
    def __init__(self, tree: object, size_bytes: int, file: str) -> None:
        self.tree = tree
        self.size_bytes = size_bytes
        self.copied_bytes = 0
        self.file = file

    def _refuse(self, problem: str) -> DatasetError:
        return DatasetError(
            f"{self.file}: not a table as DataFrame.to_pickle writes it: {problem}; nothing was executed; "
            "fetch the file again"
        )

    def read(self, wanted: Collection[str]) -> dict[str, list[object]]:
        columns, labels, blocks = self._columns_labels_and_blocks()
        names = self._column(self._index_values(columns), 0)
        cells: dict[str, list[object]] = {}
        placed = 0
        for values, placement in blocks:
            positions = self._placement(placement, len(names))
            placed += len(positions)
            if placed > len(names):
                raise self._refuse(f"its blocks hold more than its {len(names)} columns")
            for row, position in enumerate(positions):
                name = names[position]
                if isinstance(name, str) and name in wanted:
                    if name in cells:
                        raise self._refuse(f"column {name} comes twice")
                    cells[name] = self._column(values, row)
        self._check_labels(labels)
        return cells

    def _check_labels(self, labels: object) -> None:
        match labels:
            case Call(name="new_Index", arguments=(Global(), {"start": 0, "stop": int(), "step": 1})):
                return
            case Call(name="new_Index", arguments=(Global(), {"start": int(first), "stop": int(), "step": int(step)})):
                found: Sequence[object] = (first, first + step)
            case Call(name="new_Index", arguments=(Global(), {"data": values})):
                found = self._column(values, 0)
            case _:
                raise self._refuse("its rows have no labels")
        for position, label in enumerate(found):
            if label != position:
                raise DatasetError(
                    f"{self.file}: row {position} is labelled {str(label)[:40]!a}: rows are missing, doubled or out of "
                    "order, so an index means no one row; fetch the file again, or label a part of it anew with "
                    "reset_index(drop=True)"
                )

    def _columns_labels_and_blocks(self) -> tuple[object, object, list[tuple[object, object]]]:
        """The axes of column names and row labels, and of each block its values and the positions of its columns."""
        match self.tree:
            case Call(name="DataFrame", state={"_mgr": manager} | {"_data": manager}):
                pass
            case _:
                raise self._refuse("it holds no DataFrame")
        blocks: list[tuple[object, object]] = []
        match manager:
            case Call(name="BlockManager", arguments=(tuple(entries), [columns, labels])):
                for entry in entries:
                    match entry:
                        case Call(name="block", arguments=(values, placement, *_)):
                            blocks.append((values, placement))
                        case _:
                            raise self._refuse("a block is malformed")
            case Call(
                name="BlockManager", state=(_, _, _, {"0.14.1": {"axes": [columns, labels], "blocks": list(entries)}})
            ):
                for entry in entries:
                    match entry:
                        case {"values": values, "mgr_locs": placement}:
                            blocks.append((values, placement))
                        case _:
                            raise self._refuse("a block is malformed")
            case _:
                raise self._refuse("its block manager is malformed")
        return columns, labels, blocks

    def _index_values(self, index: object) -> object:
        match index:
            case Call(name="new_Index", arguments=(Global(), {"data": values})):
                return values
        raise self._refuse("its columns have no names")

    def _placement(self, placement: object, columns: int) -> list[int]:
        match placement:
            case Call(name="slice", arguments=(int() | None as start, int() | None as stop, int() | None as step)):
                if step == 0:
                    raise self._refuse("a block has a slice of step 0")
                return list(range(columns)[start:stop:step])
        cells = self._column(placement, 0)
        positions = [cell for cell in cells if isinstance(cell, int) and 0 <= cell < columns]
        if len(positions) < len(cells):
            raise self._refuse(f"a block lies outside the {columns} columns")
        return positions

    def _column(self, values: object, row: int) -> list[object]:
        """Row ``row`` of a block's values, [columns of the block, rows of the table] or [rows of the table]."""
        match values:
            case Call(name="ArrowStringArray", state={"_pa_array": array} | {"_data": array}):
                return self._arrow_texts(array)
            case Call(name="StringArray", state={"_ndarray": array}):
                values = array
            case Call(
                name="NDArrayBacked",
                state=(Call(name="StringDtype"), array, *_) | (array, Call(name="StringDtype"), *_),
            ):
                values = array
        shape, items = self._array(values)
        if len(shape) == 1:
            shape = (1, *shape)
        if len(shape) != 2 or row >= shape[0]:
            raise self._refuse(f"a block of shape {shape} has no row {row}")
        if isinstance(items, list):
            return [self._cell(item) for item in items[row * shape[1] : (row + 1) * shape[1]]]
        cells: list[object] = items.reshape(shape)[row].tolist()
        return cells

    def _cell(self, item: object) -> object:
        if isinstance(item, Call):
            shape, items = self._array(item)
            return items if len(shape) == 1 else item
        return None if isinstance(item, Global) else item

    def _array(self, node: object) -> tuple[tuple[int, ...], list[object] | NDArray[np.generic]]:
        """Shape and content of a NumPy array: a flat list for objects, an array of that shape for numbers."""
        match node:
            case Call(name="frombuffer", arguments=(payload, dtype, tuple(shape), "C" | "F" as order)):
                pass
            case Call(name="reconstruct", state=(int(), tuple(shape), dtype, bool(fortran), payload)):
                order = "F" if fortran else "C"
            case _:
                raise self._refuse("an array is malformed")
        if len(shape) > 2 or not all(type(length) is int and 0 <= length <= self.size_bytes for length in shape):
            raise self._refuse("an array's shape is malformed")
        match dtype:
            case Call(name="dtype", arguments=(str(code), *_), state=(_, "<" | ">" | "|" | "=" as byte_order, *_)):
                pass
            case _:
                raise self._refuse("an array's type is malformed")
        if code in ("O8", "O4") and isinstance(payload, list) and len(payload) == prod(shape):
            return shape, payload
        if code not in _NUMBER_TYPES:
            raise self._refuse(f"an array of type {code[:20]!a} is malformed or not supported")
        content = self._bytes(payload)
        if len(content) != prod(shape) * int(code[1:]):
            raise self._refuse(f"an array of shape {shape} has {len(content)} bytes")
        return shape, np.frombuffer(content, dtype=byte_order + code).reshape(shape, order=order)

    def _bytes(self, payload: object) -> memoryview | bytes:
        match payload:
            case memoryview():
                return payload
            case Call(name="bytes", arguments=()):
                return b""
            case Call(name="bytes", arguments=(memoryview() as content,)):
                return content
            case (
                Call(name="bytes", arguments=(str(text), "latin1" | "latin-1"))
                | Call(name="bytes", arguments=(Call(name="bytes", arguments=(str(text), "latin1")),))
            ):
                self.copied_bytes += len(text)
                if self.copied_bytes > self.size_bytes:
                    raise self._refuse("its arrays grow beyond the file")
                try:
                    return text.encode("latin-1")
                except UnicodeEncodeError:
                    raise self._refuse("an array's bytes are malformed") from None
        raise self._refuse("an array's bytes are malformed")

    def _arrow_texts(self, array: object) -> list[object]:
        match array:
            case Call(
                name="arrow_array",
                arguments=(
                    (
                        Call(name="arrow_type", arguments=("string" | "large_string" as kind,)),
                        int(length),
                        int(),
                        int(offset),
                        [validity, Call(name="arrow_buffer", arguments=(offsets,)), text],
                        *_,
                    ),
                ),
            ):
                pass
            case _:
                raise self._refuse("a text column is malformed")
        offset_type = np.dtype(_ARROW_OFFSET_TYPES[kind])
        bounds = self._bytes(offsets)
        encoded = bytes(self._arrow_buffer(text))
        if not (0 <= offset <= self.size_bytes and 0 <= length <= self.size_bytes):
            raise self._refuse("a text column is malformed")
        if len(bounds) < (offset + length + 1) * offset_type.itemsize:
            raise self._refuse("a text column is shorter than its length")
        ends = np.frombuffer(bounds, offset_type, length + 1, offset * offset_type.itemsize)
        if ends[0] < 0 or ends[-1] > len(encoded) or np.any(ends[1:] < ends[:-1]):
            raise self._refuse("a text column's offsets are malformed")
        present = np.ones(length, np.uint8)
        if validity is not None:
            bits = np.frombuffer(self._arrow_buffer(validity), np.uint8)
            present = np.unpackbits(bits, bitorder="little")[offset : offset + length]
        if len(present) != length:
            raise self._refuse("a text column's validity is malformed")
        bounds_list = ends.tolist()
        try:
            return [
                encoded[start:end].decode() if valid else None
                for start, end, valid in zip(bounds_list, bounds_list[1:], present.tolist(), strict=False)
            ]
        except UnicodeDecodeError:
            raise self._refuse("a text column is not UTF-8") from None

    def _arrow_buffer(self, buffer: object) -> memoryview | bytes:
        match buffer:
            case None:
                return b""
            case Call(name="arrow_buffer", arguments=(payload,)):
                return self._bytes(payload)
        raise self._refuse("a text column is malformed")
