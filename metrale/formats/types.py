"""Element and block formats: how many elements share how many bytes, and what NumPy type carries them.

A *dense* format stores one element in a fixed number of bytes. A *block* format stores `block` consecutive elements of a
row in `nbytes` bytes, scales included; a row is a whole number of blocks. The list holds every format that the two
containers can name, whether or not something here can compute with it: `metrale inspect` shows them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple


class Format(NamedTuple):
    """One storage format.

    block: elements of one unit. nbytes: bytes of one unit. carrier: the NumPy dtype of a dense element; None for packed
    formats, whose rows travel as uint8.
    """

    name: str
    block: int
    nbytes: int
    carrier: str | None

    @property
    def bits(self) -> float:
        """Return the bits an element costs, scales included."""
        return 8 * self.nbytes / self.block

    @property
    def packed(self) -> bool:
        """Say whether rows travel as uint8 (blocks, or elements smaller than a byte)."""
        return self.carrier is None

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row; `columns` must be a multiple of `block`."""
        return columns // self.block * self.nbytes


_DENSE: Final = {
    "f64": (8, "float64"), "f32": (4, "float32"), "f16": (2, "float16"), "bf16": (2, "uint16"), "c64": (8, "complex64"),
    "i64": (8, "int64"), "i32": (4, "int32"), "i16": (2, "int16"), "i8": (1, "int8"),
    "u64": (8, "uint64"), "u32": (4, "uint32"), "u16": (2, "uint16"), "u8": (1, "uint8"), "bool": (1, "bool"),
    "f8_e4m3": (1, "uint8"), "f8_e5m2": (1, "uint8"), "f8_e8m0": (1, "uint8"), "f8_e4m3fnuz": (1, "uint8"),
    "f8_e5m2fnuz": (1, "uint8"),
}  # fmt: skip

# Elements of a unit and its bytes.
_PACKED: Final = {
    "f4": (2, 1), "f6_e2m3": (4, 3), "f6_e3m2": (4, 3),
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q8_1": (32, 40),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "q8_k": (256, 292),
    "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq2_s": (256, 82),
    "iq3_xxs": (256, 98), "iq3_s": (256, 110), "iq4_nl": (32, 18), "iq4_xs": (256, 136),
    "tq1_0": (256, 54), "tq2_0": (256, 66), "mxfp4": (32, 17), "nvfp4": (64, 36), "q1_0": (128, 18),
}  # fmt: skip

FORMATS: Final[dict[str, Format]] = {
    **{name: Format(name, 1, nbytes, carrier) for name, (nbytes, carrier) in _DENSE.items()},
    **{name: Format(name, block, nbytes, None) for name, (block, nbytes) in _PACKED.items()},
}

# NumPy addresses at most this many bytes and dimensions; a header that claims more is a lie about its own file.
MAX_BYTES: Final = 2**63 - 1
MAX_RANK: Final = 32


def tensor_bytes(form: Format, shape: Sequence[int]) -> int | None:
    """Return the bytes of a tensor, or None if its last axis is not a whole number of units."""
    columns = shape[-1] if shape else 1
    if columns % form.block:
        return None
    return math.prod(shape[:-1]) * form.row_bytes(columns)


def addressable(form: Format, shape: Sequence[int]) -> bool:
    """Say whether NumPy can hold the shape: axes of length 0 do not hide the size of the others."""
    if len(shape) > MAX_RANK:
        return False
    return math.prod(n for n in shape if n) * max(form.nbytes, 1) <= MAX_BYTES
