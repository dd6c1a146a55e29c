"""Ordering with the device: one stream runs every step, so order is the order of issue.

Work on a further stream (copies that overlap steps) is ordered by events made here, in both directions, also when it
fails: the main stream never runs ahead of what it reads, the other never overwrites what is still read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from metrale.backends.base import Stream
from metrale.model.core import Core


class Streams:
    """The model's streams."""

    def __init__(self, core: Core) -> None:
        """Order work of a model's core."""
        self._core = core

    def synchronize(self) -> None:
        """Wait until the device has done everything asked of it."""
        self._core.backend.stream.synchronize()

    @contextmanager
    def beside(self, other: Stream) -> Iterator[Stream]:
        """Run the block's work on `other`: after all earlier steps, before all later ones, whatever the block raises."""
        main = self._core.backend.stream
        other.wait(main.record())
        try:
            yield other
        finally:
            main.wait(other.record())
