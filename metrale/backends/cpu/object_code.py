"""Load a relocatable object file into this process without LLVM.

Numba compiles a kernel to an ELF object; kept on disk, it can be placed into memory by copying its sections and filling
in addresses. That spares a warm start the import of Numba and llvmlite (0.5 s and 70 MB here). LLVM's JIT uses the large
code model on x86-64, so absolute 64-bit relocations are all there is; anything else is refused and the caller goes the
long way through Numba.

Source: System V Application Binary Interface, AMD64 supplement, chapter 4 (object files)
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from functools import cache
from typing import Any, Final, NamedTuple

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_RELA: Final = struct.Struct("<QQq")
_SHT_SYMTAB: Final = 2
_SHT_RELA: Final = 4
_SHT_NOBITS: Final = 8
_SHF_ALLOC: Final = 2
_SHT_X86_64_UNWIND: Final = 0x70000001
_EM_X86_64: Final = 62
_R_X86_64_64: Final = 1
_UNDEFINED: Final = 0
_COMMON: Final = (0xFFF2, 0xFF02)  # ordinary and large-model
_COMMON_BYTES: Final = 4096  # room for them; Numba has one pointer each function

# Numba's error path and reference counts: linked in, and never reached, since a kernel neither raises nor owns memory.
_NEVER_CALLED: Final = ("numba_", "NRT_")


class NotLoadable(Exception):
    """The object needs something that this loader does not do; the sentence says what."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class LoadedObject:
    """Code in memory; keep it as long as anything may call into it."""

    def __init__(self, data: bytes, symbol: str) -> None:
        """Place the object and find `symbol`.

        Raises: NotLoadable.
        """
        try:
            sections = _sections(data)
            places, end = _layout(sections)
            self._common = (end + 15) // 16 * 16
            size = self._common + _COMMON_BYTES
            self._memory = mmap.mmap(-1, size)
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            for i, place in places.items():
                section = sections[i]
                if section.kind != _SHT_NOBITS:
                    self._memory[place : place + section.size] = data[section.offset : section.offset + section.size]
            self.address = self._link(data, sections, places, symbol)
        except (struct.error, IndexError, ValueError) as error:
            raise NotLoadable(f"damaged object file ({error})") from error
        if _libc().mprotect(self._base, size, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
            raise NotLoadable("this system allows no new executable memory")

    def _link(self, data: bytes, sections: list[_Section], places: dict[int, int], symbol: str) -> int:
        (table,) = [s for s in sections if s.kind == _SHT_SYMTAB]
        names = sections[table.link]
        values: dict[int, int] = {}
        found, common = 0, self._common  # common symbols start as zeros and are not written: the page becomes read-only
        for i in range(table.size // _SYMBOL.size):
            name_at, _, _, home, value, length = _SYMBOL.unpack_from(data, table.offset + i * _SYMBOL.size)
            start = names.offset + name_at
            name = data[start : data.index(b"\0", start)].decode()
            if home in places:
                values[i] = self._base + places[home] + value
                if name == symbol:
                    found = values[i]
            elif home == _UNDEFINED and name:
                values[i] = _outside(name)
            elif home in _COMMON:
                values[i] = self._base + common
                common += (length + 15) // 16 * 16
                if common > self._common + _COMMON_BYTES:
                    raise NotLoadable("more common symbols than there is room for")
        if not found:
            raise NotLoadable(f"no symbol {symbol}")
        for section in sections:
            if section.kind == _SHT_RELA and section.info in places:
                self._relocate(data, section, places[section.info], values)
        return found

    def _relocate(self, data: bytes, section: _Section, place: int, values: dict[int, int]) -> None:
        for at in range(section.offset, section.offset + section.size, _RELA.size):
            offset, info, addend = _RELA.unpack_from(data, at)
            if info & 0xFFFFFFFF != _R_X86_64_64:
                raise NotLoadable(f"relocation type {info & 0xFFFFFFFF}")
            if info >> 32 not in values:
                raise NotLoadable(f"relocation against symbol {info >> 32}")
            struct.pack_into("<Q", self._memory, place + offset, (values[info >> 32] + addend) & 0xFFFFFFFFFFFFFFFF)


def _sections(data: bytes) -> list[_Section]:
    ident, kind, machine, _, _, _, table, _, _, _, _, entry, count, _ = _HEADER.unpack_from(data)
    if ident[:6] != b"\x7fELF\x02\x01" or kind != 1 or machine != _EM_X86_64 or entry != _SECTION.size:
        raise NotLoadable("not a relocatable x86-64 ELF object")
    return [_Section(*_SECTION.unpack_from(data, table + i * entry)) for i in range(count)]


def _layout(sections: list[_Section]) -> tuple[dict[int, int], int]:
    """Return the offset of each section that is needed at run time, and the size of all; unwind tables are not."""
    places, end = {}, 0
    for i, section in enumerate(sections):
        if section.flags & _SHF_ALLOC and section.size and section.kind != _SHT_X86_64_UNWIND:
            align = max(section.align, 1)
            end = (end + align - 1) // align * align
            places[i] = end
            end += section.size
    return places, end


@cache
def _outside(name: str) -> int:
    """Return the address of a symbol of the C library or the interpreter."""
    library: Any = ctypes.pythonapi  # dlsym over what the process has loaded, the C and math libraries included
    for source in (library, ctypes.CDLL("libm.so.6")):
        try:
            return int(ctypes.cast(getattr(source, name), ctypes.c_void_p).value or 0)
        except AttributeError:
            continue
    if name.startswith(_NEVER_CALLED):
        return int(ctypes.cast(_libc().abort, ctypes.c_void_p).value or 0)
    raise NotLoadable(f"outside symbol {name}")


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mprotect.restype = ctypes.c_int
    return library
