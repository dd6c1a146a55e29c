"""Progress on a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """A bar on stderr when stderr is a terminal; silent otherwise.

    `update(done, total)` takes absolute counts, as the loader and the puller report them. above: totals up to this show
    nothing.
    """

    def __init__(self, label: str, *, unit: str = "B", above: int = 0) -> None:
        self._above = above
        self._label = label
        self._unit = unit
        self._bar: Any = None
        self._shown = sys.stderr.isatty()

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are finished."""
        if not self._shown or 0 < total <= self._above:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total or None,
                desc=self._label,
                unit=self._unit,
                unit_scale=True,
                unit_divisor=1024 if self._unit == "B" else 1000,
                leave=False,
                file=sys.stderr,
            )
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar; harmless twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
