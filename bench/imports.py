"""Time `import metrale` beyond the bare interpreter."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from bench.report import ROOT, Line

BAR_MS = 60
REPEATS = 15


def _wall_ms(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return 1e3 * (time.perf_counter() - start)


def run(args: argparse.Namespace) -> list[Line]:
    """Return the median extra time over alternating bare and importing interpreters."""
    _wall_ms("import metrale")
    extra = [_wall_ms("import metrale") - _wall_ms("pass") for _ in range(REPEATS)]
    return [Line("import/metrale", statistics.median(extra), "ms beyond the interpreter", bar=f"<= {BAR_MS}")]
