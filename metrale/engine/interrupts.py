"""Ctrl-C between steps instead of inside them.

Python raises KeyboardInterrupt between any two bytecodes: between taking a block and noting who has it, say. A step is
short, so it is let finish; a second Ctrl-C is not held back, for a device that hangs.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class InterruptsDeferred:
    """Within the block the first SIGINT is only noted; leaving the block raises it.

    Does nothing outside the main thread (where no signal arrives), inside another such block, and where a program has
    installed a handler of its own.
    """

    __slots__ = ("_active", "_pending")

    def __init__(self) -> None:
        self._active = False
        self._pending = False

    def __enter__(self) -> InterruptsDeferred:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._active = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._active:
            self._active = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._pending:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
