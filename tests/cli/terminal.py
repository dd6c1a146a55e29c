"""Run `python -m metrale` with pipes, or under a pseudo-terminal whose every byte is kept."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from types import TracebackType
from typing import Any

COMMAND = (sys.executable, "-m", "metrale")
LIMIT_S = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def default_interrupts() -> None:
    """Let Ctrl-C mean Ctrl-C in the child, whatever the test runner ignores."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def metrale(
    *args: str, stdin: bytes | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with pipes for all three streams."""
    done = subprocess.run(
        [*COMMAND, *args], input=stdin or b"", capture_output=True, timeout=LIMIT_S, check=False,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


class Terminal:
    """A command whose stdin, stdout and stderr are a terminal; with `stdout_pipe` only stdin and stderr are."""

    def __init__(self, *args: str, stdout_pipe: bool = False, env: dict[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 100))
        self.process = subprocess.Popen(
            [*COMMAND, *args], stdin=slave, stdout=subprocess.PIPE if stdout_pipe else slave, stderr=slave,
            start_new_session=True, preexec_fn=self._own_terminal, env={**os.environ, "TERM": "dumb", **(env or {})},
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    @staticmethod
    def _own_terminal() -> None:
        default_interrupts()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, *, after: int = 0) -> re.Match[str]:
        """Read until the pattern stands in what was seen from `after` on."""
        end = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.seen[after:])) is None:
            assert self._read(end - time.monotonic()), f"ended or silent without {pattern!r}:\n{self.seen}"
        return found

    def finish(self) -> int:
        """Read to the end and return the exit status."""
        end = time.monotonic() + LIMIT_S
        while self._read(end - time.monotonic()):
            pass
        return self.process.wait(timeout=LIMIT_S)

    def _read(self, patience: float) -> bool:
        if not select.select([self._master], [], [], max(0.0, patience))[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the last holder of the other side has closed it
            return False
        self.seen += _ESCAPES.sub("", data.decode(errors="replace"))
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        os.close(self._master)


def group(line: str) -> dict[str, Any]:
    """Return the JSON object a command printed as its only line."""
    assert line.endswith("\n")
    assert line.count("\n") == 1
    value: dict[str, Any] = json.loads(line)
    return value
