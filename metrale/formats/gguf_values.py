"""GGUF's metadata values and the bounded cursor that reads them.

A large array (a vocabulary, its merges) is only measured when the file is opened, in one pass over the string lengths;
it is decoded when it is first read. What is kept is a copy of its bytes, so metadata outlives the map.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

from metrale.errors import UnsupportedError, WeightError
from metrale.formats.mapped import REFETCH, MappedFile, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_STRING_BYTES: Final = 64 << 20  # a chat template has kilobytes, a whole vocabulary is an array
MAX_NAME_BYTES: Final = 65_535  # keys and tensor names

_U64: Final = struct.Struct("<Q")
_U32: Final = struct.Struct("<I")


class Scalar(NamedTuple):
    """One scalar value type: its name (also of NumPy's and struct's), its struct code and its size."""

    name: str
    code: str
    nbytes: int


# Value types of GGUF by number; 8 is a string and 9 an array.
SCALARS: Final[dict[int, Scalar]] = {
    0: Scalar("uint8", "B", 1), 1: Scalar("int8", "b", 1), 2: Scalar("uint16", "H", 2), 3: Scalar("int16", "h", 2),
    4: Scalar("uint32", "I", 4), 5: Scalar("int32", "i", 4), 6: Scalar("float32", "f", 4), 7: Scalar("bool", "?", 1),
    10: Scalar("uint64", "Q", 8), 11: Scalar("int64", "q", 8), 12: Scalar("float64", "d", 8),
}  # fmt: skip
STRING: Final = 8
ARRAY: Final = 9


class ArrayValue(Sequence[Any]):
    """An array of the metadata: a sequence of str, int, float or bool, decoded at the first access.

    element: "string" or the name of a scalar type ("int32", "float32", "bool", ...).
    """

    __slots__ = ("_bytes", "_count", "_items", "_key", "element")

    def __init__(self, key: str, element: str, count: int, data: bytes) -> None:
        self.element = element
        self._key = key
        self._count = count
        self._bytes = data
        self._items: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one item, or a tuple of them.

        Raises: WeightError ``weights.utf8`` when an array of strings holds one that is not UTF-8.
        """
        return self._decoded()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._decoded())

    def __repr__(self) -> str:
        return f"<{self._count} x {self.element}>"

    def raw_strings(self) -> list[bytes]:
        """Return an array of strings as bytes, undecoded."""
        if self.element != "string":
            raise TypeError(f"{self._key}: expected an array of strings, got {self.element}; use numpy() or iterate over it")
        data, position, out = self._bytes, 0, []
        for _ in range(self._count):
            (length,) = _U64.unpack_from(data, position)
            position += 8 + length
            out.append(data[position - length : position])
        return out

    def numpy(self) -> NDArray[Any]:
        """Return an array of numbers as a read-only NumPy array of its element type."""
        import numpy as np

        if self.element == "string":
            raise TypeError(f"{self._key}: an array of strings has no NumPy form; iterate over it")
        if self.element == "bool":
            truth: NDArray[Any] = np.frombuffer(self._bytes, np.uint8) != 0
            return truth
        numbers: NDArray[Any] = np.frombuffer(self._bytes, np.dtype(self.element).newbyteorder("<"))
        return numbers

    def _decoded(self) -> tuple[Any, ...]:
        if self._items is None:
            if self.element == "string":
                self._items = self._decoded_strings()
            else:
                code = next(scalar.code for scalar in SCALARS.values() if scalar.name == self.element)
                self._items = struct.unpack(f"<{self._count}{code}", self._bytes)
        return self._items

    def _decoded_strings(self) -> tuple[str, ...]:
        raw = self.raw_strings()
        try:
            return tuple([str(item, "utf-8") for item in raw])
        except UnicodeDecodeError as error:
            index = raw.index(error.object)
            raise _not_utf8(f"{self._key}[{index}]", error) from None


class Cursor:
    """A bounded reader over the header of a mapped GGUF file; every step checks the file's end first."""

    __slots__ = ("_buffer", "_size", "file", "position")

    def __init__(self, file: MappedFile, position: int = 0) -> None:
        self.file = file
        self.position = position
        self._buffer = file.buffer
        self._size = file.size

    @property
    def remaining(self) -> int:
        """Return the bytes left in the file."""
        return self._size - self.position

    def take(self, nbytes: int, what: str) -> int:
        """Step over `nbytes` and return where they begin.

        Raises: WeightError ``weights.truncated`` when the file ends before.
        """
        start = self.position
        if nbytes > self._size - start:
            raise WeightError(
                f"{self.file.path}: expected {nbytes} bytes of {what} at byte {start}, got {self._size - start} to the end of "
                f"the file; {REFETCH}",
                code="weights.truncated",
            )
        self.position = start + nbytes
        return start

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit number."""
        return int(_U32.unpack_from(self._buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit number."""
        return int(_U64.unpack_from(self._buffer, self.take(8, what))[0])

    def u64s(self, count: int, what: str) -> tuple[int, ...]:
        """Read `count` unsigned 64-bit numbers; the caller bounds `count`."""
        return struct.unpack_from(f"<{count}Q", self._buffer, self.take(8 * count, what))

    def text(self, what: str, limit: int) -> str:
        """Read a string: its length, then UTF-8.

        Raises: WeightError ``weights.string`` over `limit` bytes, ``weights.utf8``, ``weights.truncated``.
        """
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise WeightError(
                f"{self.file.path}: expected {what} of at most {limit} bytes, got a length of {length}; {REFETCH}",
                code="weights.string",
            )
        start = self.take(length, what)
        try:
            return str(self._buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{self.file.path}, {what}", error) from None

    def value(self, key: str) -> Any:
        """Read a value type and its value: int, float, bool, str or ArrayValue.

        Raises: WeightError ``weights.value_type``, ``weights.bool`` and those of `text`; UnsupportedError
                ``unsupported.nested_array``.
        """
        kind = self.u32(f"the type of {shown(key)}")
        if kind in SCALARS:
            return self._scalar(key, SCALARS[kind])
        if kind == STRING:
            return self.text(f"the value of {shown(key)}", MAX_STRING_BYTES)
        if kind == ARRAY:
            return self._array(key)
        raise _value_type(self.file, key, kind)

    def _scalar(self, key: str, scalar: Scalar) -> Any:
        start = self.take(scalar.nbytes, f"the value of {shown(key)}")
        if scalar.code == "?" and self._buffer[start] > 1:
            raise _not_bool(self.file, key, self._buffer[start])
        return struct.unpack_from("<" + scalar.code, self._buffer, start)[0]

    def _array(self, key: str) -> ArrayValue:
        kind = self.u32(f"the element type of {shown(key)}")
        count = self.u64(f"the length of {shown(key)}")
        if kind == ARRAY:
            raise UnsupportedError(
                f"{self.file.path}: expected {shown(key)} to be a flat array, got an array of arrays; remove the key with "
                "gguf-new-metadata, no known model needs one",
                code="unsupported.nested_array",
            )
        if kind == STRING:
            start = self.position
            self._skip_strings(key, count)
            return ArrayValue(key, "string", count, self._buffer[start : self.position])
        if kind not in SCALARS:
            raise _value_type(self.file, key, kind)
        scalar = SCALARS[kind]
        start = self.take(count * scalar.nbytes, f"the items of {shown(key)}")
        data = self._buffer[start : self.position]
        if scalar.code == "?" and (bad := data.translate(None, b"\0\1")):
            raise _not_bool(self.file, key, bad[0])
        return ArrayValue(key, scalar.name, count, data)

    def _skip_strings(self, key: str, count: int) -> None:
        """Walk over `count` strings, reading their lengths only: the one loop that a large vocabulary pays for."""
        what = f"the items of {shown(key)}"
        if count > self.remaining // 8:  # before the loop: a lying count must not cost its own time
            self.take(8 * count, what)
        lengths, buffer, position = _U64.unpack_from, self._buffer, self.position
        last = self._size - 8
        for _ in range(count):
            if position > last:
                break
            position += 8 + lengths(buffer, position)[0]
        else:
            if position <= self._size:
                self.position = position
                return
        self.take(position + 8 - self.position, what)  # raises: either exit of the loop left less than that


def _value_type(file: MappedFile, key: str, kind: int) -> WeightError:
    return WeightError(
        f"{file.path}: expected a value type of 0 to 12 for {shown(key)}, got {kind}; {REFETCH}", code="weights.value_type"
    )


def _not_bool(file: MappedFile, key: str, byte: int) -> WeightError:
    return WeightError(f"{file.path}: expected 0 or 1 as the bool {shown(key)}, got {byte}; {REFETCH}", code="weights.bool")


def _not_utf8(subject: str, error: UnicodeDecodeError) -> WeightError:
    return WeightError(
        f"{subject}: expected UTF-8, got byte {error.object[error.start]:#04x} at {error.start}; convert the model again, or "
        "fetch the file again",
        code="weights.utf8",
    )
