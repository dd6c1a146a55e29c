"""Time from the shell to the first token of `metrale generate`, warm and with an empty kernel cache."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.report import ROOT, Line
from metrale import hub, paths

MODEL = "smollm2-135m"
WARM_BAR_S = 1.5
COLD_BAR_S = 20.0


def _first_token_s(env: dict[str, str], model: str) -> float:
    command = [sys.executable, "-m", "metrale", "generate", model, "The capital of France is", "--max-tokens", "4"]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - start
    process.stdout.read()
    if process.wait() != 0 or not first:
        raise SystemExit(f"{' '.join(command)}: expected a token, got exit status {process.returncode}")
    return seconds


def run(args: argparse.Namespace) -> list[Line]:
    """Return the median of five warm starts, and one start whose compiled kernels must be made first."""
    path = hub.pull(MODEL)
    _first_token_s(dict(os.environ), MODEL)
    warm = statistics.median(_first_token_s(dict(os.environ), MODEL) for _ in range(5))
    with tempfile.TemporaryDirectory() as empty:
        (Path(empty) / "models").symlink_to(paths.models_dir())
        cold = _first_token_s({**os.environ, "METRALE_CACHE": empty}, str(path))
    return [
        Line("start/warm", warm, "s to the first token", bar=f"<= {WARM_BAR_S}"),
        Line("start/cold", cold, "s to the first token, empty kernel cache", bar=f"<= {COLD_BAR_S}"),
    ]
