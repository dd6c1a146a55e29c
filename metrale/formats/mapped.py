"""One read-only memory map of a checkpoint file, and the errors of opening it.

Nothing here reads tensor bytes: pages come in when an array over the map is read, and leave the process again with
`MappedFile.release`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path
from typing import Final

from metrale.errors import WeightError

REFETCH: Final = "the file is damaged or its download stopped early, fetch it again"
_LFS_TEXT: Final = b"version https://git-lfs"
_MAX_SHOWN: Final = 100
_FOLIO_BYTES: Final = 2 << 20


def shown(name: object) -> str:
    """Return a name from a file as one printable line of bounded length, for error sentences."""
    text = str(name)
    if len(text) > _MAX_SHOWN:
        return ascii(text[:_MAX_SHOWN]) + "..."
    return text if text.isprintable() and text.strip() == text != "" else ascii(text)


class MappedFile:
    """A file mapped into memory, read-only.

    Lifetime: arrays over the map keep it alive after `close`; `close` only forbids new ones. Threads: any may read.
    Truncating the file on disk while it is mapped ends the process at the next read past its new end, as with every
    memory map.
    """

    __slots__ = ("_map", "path", "size")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and map `path`.

        Raises: WeightError ``weights.not_found``, ``weights.unreadable``, ``weights.truncated`` (an empty file) or
                ``weights.lfs_pointer`` (a Git-LFS pointer in place of the file).
        """
        self.path = Path(path)
        self._map: mmap.mmap | None = _map_file(self.path)
        self.size = len(self._map)
        if self._map[: len(_LFS_TEXT)] == _LFS_TEXT:
            self.close()
            raise WeightError(
                f"{self.path}: expected a checkpoint, got a Git-LFS pointer of {self.size} bytes; "
                "run `git lfs pull` in its folder, or fetch the file itself",
                code="weights.lfs_pointer",
            )

    @property
    def buffer(self) -> mmap.mmap:
        """Return the map itself.

        Raises: WeightError ``weights.closed`` after `close`.
        """
        if self._map is None:
            raise WeightError(
                f"{self.path}: expected an open checkpoint, got a closed one; read tensors before closing it",
                code="weights.closed",
            )
        return self._map

    def read(self, start: int, stop: int) -> bytes:
        """Return a copy of the bytes [start, stop), clipped to the file."""
        return self.buffer[start:stop]

    def release(self, offset: int, nbytes: int) -> None:
        """Give the pages of a span back to the system; reading them again brings them back from the file.

        The span is widened: a fault maps as much of the page cache's folio as it can, neighbours included, and a folio
        has up to 2 MiB.
        """
        if self._map is None or nbytes <= 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = max(0, offset - _FOLIO_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, min(offset + nbytes + _FOLIO_BYTES, self.size) - start)

    def close(self) -> None:
        """Forbid new arrays over the map and unmap it once the existing ones are gone; may be called twice."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # arrays still point into it: the last of them unmaps it
                mapped.close()


def _map_file(path: Path) -> mmap.mmap:
    try:
        # Looked at before it is opened: opening a pipe would wait for its writer.
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise WeightError(
                f"{path}: expected a regular file, got a {_kind(status.st_mode)}; pass a checkpoint's file or folder",
                code="weights.unreadable",
            )
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise WeightError(f"{path}: expected a checkpoint, got an empty file; {REFETCH}", code="weights.truncated")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise WeightError(
            f"{path}: expected a checkpoint, got nothing at this path; check the spelling, or fetch it with `metrale pull`",
            code="weights.not_found",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise WeightError(
            f"{shown(path)}: expected a readable file, got {error}; check its permissions and the disk",
            code="weights.unreadable",
        ) from error


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for test, name in kinds if test(mode)), "device")
