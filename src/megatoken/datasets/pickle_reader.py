"""Reads a pickle as data: what it asks to build is recorded as an inert tree, and nothing in it is ever called.

Python's own unpickler imports and calls whatever a file names. This one has no import and no call to make: a global
becomes a ``Global`` if it is on the caller's allow list (otherwise the file is refused), and every "call this" becomes
a ``Call`` node that only remembers its arguments. Work and memory are linear in the size of the file, whatever sizes
and memo slots the file claims. Covers what Python's pickler writes with protocols 2 to 5 for lists, tuples,
dictionaries with text keys, numbers, text, bytes and objects.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatoken.errors import DatasetError

_LONGEST_INTEGER_BYTES = 16
_LONGEST_NAME_SHOWN = 80
_INTEGER_OPCODES = b"KMJ"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Global:
    """A class or function the pickle names, under the allow list's name for it."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """An object the pickle asks to build: its global, the arguments, and the state set afterwards. Never performed."""

    name: str
    arguments: tuple[object, ...]
    state: object = None


def parse_pickle(data: bytes, allowed: Mapping[tuple[str, str], str], file: str) -> object:
    """Returns the tree a pickle describes.

    Args:
        data: The whole file.
        allowed: (module, qualified name) -> the name to use in the tree; any other global refuses the file.
        file: What to call the file in an error.

    Returns:
        ``None``, bool, int, float, str, memoryview (for bytes), list, tuple, dict with str keys, ``Global`` or
        ``Call``. Lists may be shared between places, and may even contain themselves.

    Raises:
        DatasetError: The file is no pickle, is damaged, names a global that is not allowed, or uses a feature that
            plain tables do not.
    """
    return _Parser(data, allowed, file).parse()


class _Parser:
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], str], file: str) -> None:
        self.data = data
        self.view = memoryview(data)
        self.allowed = allowed
        self.file = file
        self.position = 0
        self.stack: list[object] = []
        self.outer_stacks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.integers: dict[int, int] = {}

    def parse(self) -> object:
        if not self.data.startswith(b"\x80"):
            raise self._refuse("not a pickle of protocol 2 to 5; write it with DataFrame.to_pickle and unpacked")
        while True:
            opcode = self._take(1)[0]
            if opcode in _INTEGER_OPCODES:
                self.position -= 1
                self._integers()
            elif opcode == ord("."):
                return self._pop()
            elif handler := _HANDLERS.get(opcode):
                handler(self)
            else:
                raise self._refuse(
                    f"opcode 0x{opcode:02x} is not one that DataFrame.to_pickle writes (protocols 2 to 5)"
                )

    def _refuse(self, problem: str) -> DatasetError:
        return DatasetError(f"{self.file}: byte {self.position}: {problem}; nothing was executed")

    def _damaged(self) -> DatasetError:
        return self._refuse("not a pickle, or a damaged one: fetch the file again")

    def _take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.data):
            raise self._refuse("the file ends early: fetch it again")
        taken = self.view[self.position : end]
        self.position = end
        return taken

    def _number(self, layout: struct.Struct) -> int:
        number: int = layout.unpack(self._take(layout.size))[0]
        return number

    def _line(self) -> str:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise self._damaged()
        line = self._take(end + 1 - self.position)[:-1]
        return self._text(line)

    def _text(self, encoded: memoryview) -> str:
        try:
            return str(encoded, "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self._damaged() from None

    def _pop(self) -> object:
        if not self.stack:
            raise self._damaged()
        return self.stack.pop()

    def _pop_to_mark(self) -> list[object]:
        if not self.outer_stacks:
            raise self._damaged()
        items = self.stack
        self.stack = self.outer_stacks.pop()
        return items

    def _mark(self) -> None:
        self.outer_stacks.append(self.stack)
        self.stack = []

    def _integers(self) -> None:
        """Pushes a run of integers; token lists are nearly all of the file, so equal values share one object."""
        data, position, push, share = self.data, self.position, self.stack.append, self.integers.setdefault
        try:
            while True:
                opcode = data[position]
                if opcode == 0x4D:
                    value = data[position + 1] | data[position + 2] << 8
                    push(share(value, value))
                    position += 3
                elif opcode == 0x4B:
                    push(data[position + 1])
                    position += 2
                elif opcode == 0x4A and position + 5 <= len(data):
                    value = int.from_bytes(data[position + 1 : position + 5], "little", signed=True)
                    push(share(value, value))
                    position += 5
                else:
                    break
        except IndexError:
            raise self._damaged() from None
        if position == self.position:
            raise self._damaged()
        self.position = position

    def _long(self) -> None:
        count = self._take(1)[0]
        if count > _LONGEST_INTEGER_BYTES:
            raise self._refuse(f"an integer of {count} bytes; a table holds none above {_LONGEST_INTEGER_BYTES}")
        self.stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def _global(self) -> None:
        self._push_global(self._line(), self._line())

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise self._damaged()
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        known = self.allowed.get((module, name))
        if known is None:
            shown = ascii(f"{module}.{name}"[:_LONGEST_NAME_SHOWN])
            raise self._refuse(
                f"the pickle asks for {shown}, which a plain table does not need; do not open it with pandas or pickle "
                "but fetch it again from its publisher"
            )
        self.stack.append(Global(known))

    def _call(self) -> None:
        arguments, target = self._pop(), self._pop()
        # A recorded call may itself be called: pandas 1.3 writes functools.partial(f)(x), and it takes the name of f.
        if not (isinstance(target, Global | Call) and isinstance(arguments, tuple)):
            raise self._damaged()
        self.stack.append(Call(target.name, arguments))

    def _build(self) -> None:
        state = self._pop()
        if not self.stack or not isinstance(call := self.stack[-1], Call) or call.state is not None:
            raise self._damaged()
        call.state = state

    def _append(self) -> None:
        self._extend([self._pop()])

    def _appends(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, items: list[object]) -> None:
        if not self.stack or not isinstance(target := self.stack[-1], list):
            raise self._damaged()
        target.extend(items)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._pop_to_mark())

    def _update(self, items: list[object]) -> None:
        if not self.stack or not isinstance(target := self.stack[-1], dict) or len(items) % 2:
            raise self._damaged()
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                # Only text has a hash that is randomised and cannot recurse.
                raise self._refuse(f"a dictionary key of type {type(key).__name__}; a table has only text keys")
            target[key] = value

    def _tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise self._damaged()
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def _tuple_to_mark(self) -> None:
        items = tuple(self._pop_to_mark())
        self.stack.append(items)

    def _put(self, slot: int) -> None:
        if not self.stack:
            raise self._damaged()
        self.memo[slot] = self.stack[-1]

    def _get(self, slot: int) -> None:
        if slot not in self.memo:
            raise self._damaged()
        self.stack.append(self.memo[slot])

    def _frame(self) -> None:
        self._take(8)  # a hint for buffered reading

    def _protocol(self) -> None:
        protocol = self._take(1)[0]
        if not 2 <= protocol <= 5:
            raise self._refuse(f"pickle protocol {protocol}; only 2 to 5 are read")


_BYTE = struct.Struct("<B")
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")
_DOUBLE = struct.Struct(">d")


def _constant(value: object) -> Callable[[_Parser], None]:
    return lambda parser: parser.stack.append(value)


def _text_of(size: struct.Struct) -> Callable[[_Parser], None]:
    return lambda parser: parser.stack.append(parser._text(parser._take(parser._number(size))))


def _bytes_of(size: struct.Struct) -> Callable[[_Parser], None]:
    return lambda parser: parser.stack.append(parser._take(parser._number(size)))


_HANDLERS: dict[int, Callable[[_Parser], None]] = {
    0x80: _Parser._protocol,
    0x95: _Parser._frame,
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    0x8A: _Parser._long,
    ord("G"): lambda parser: parser.stack.append(parser._number(_DOUBLE)),
    0x8C: _text_of(_BYTE),
    ord("X"): _text_of(_UINT32),
    0x8D: _text_of(_UINT64),
    ord("C"): _bytes_of(_BYTE),
    ord("B"): _bytes_of(_UINT32),
    0x8E: _bytes_of(_UINT64),
    0x96: _bytes_of(_UINT64),
    ord("("): _Parser._mark,
    ord("]"): lambda parser: parser.stack.append([]),
    ord("}"): lambda parser: parser.stack.append({}),
    ord(")"): _constant(()),
    0x85: lambda parser: parser._tuple(1),
    0x86: lambda parser: parser._tuple(2),
    0x87: lambda parser: parser._tuple(3),
    ord("t"): _Parser._tuple_to_mark,
    ord("a"): _Parser._append,
    ord("e"): _Parser._appends,
    ord("s"): _Parser._set_item,
    ord("u"): _Parser._set_items,
    ord("c"): _Parser._global,
    0x93: _Parser._stack_global,
    ord("R"): _Parser._call,
    0x81: _Parser._call,
    ord("b"): _Parser._build,
    ord("q"): lambda parser: parser._put(parser._number(_BYTE)),
    ord("r"): lambda parser: parser._put(parser._number(_UINT32)),
    0x94: lambda parser: parser._put(len(parser.memo)),
    ord("h"): lambda parser: parser._get(parser._number(_BYTE)),
    ord("j"): lambda parser: parser._get(parser._number(_UINT32)),
}
