"""The one form of a measured line, and where lines are kept."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure.

    `name` begins with its routine (``cpu/decode``). `ratio` is value over `against` (a floor or a peer, with version);
    `bar` is what the ratio (or, where there is none, the value) must reach, written ">= 1.5" or "<= 60"; `ok` is None
    where there is no bar.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    against: str | None = None
    bar: str | None = None
    note: str | None = None

    @property
    def ok(self) -> bool | None:
        """Say whether the bar is met; None without one."""
        if self.bar is None:
            return None
        sign, limit = self.bar.split()
        judged = self.value if self.ratio is None else self.ratio
        return judged >= float(limit) if sign == ">=" else judged <= float(limit)


def cpu_name() -> str:
    """Return the processor's name and core count."""
    model = platform.processor() or platform.machine()
    try:
        for row in Path("/proc/cpuinfo").read_text().splitlines():
            if row.startswith("model name"):
                model = row.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux: the platform module's name serves
    import os

    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Return the short commit, with a + when the tree has changes."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "-uno") else "")


def as_json(lines: list[Line], machine: str) -> str:
    """Return one JSON object a line."""
    rev = commit()
    return "\n".join(
        json.dumps(
            {
                **{k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(line).items()},
                "ok": line.ok,
                "machine": machine,
                "commit": rev,
                "date": date.today().isoformat(),
            }
        )
        for line in lines
    )


def as_table(lines: list[Line]) -> str:
    """Return an aligned table for people."""
    rows = [("name", "value", "unit", "ratio", "against", "bar", "ok", "note")]
    for line in lines:
        verdict = "" if line.ok is None else ("yes" if line.ok else "NO")
        rows.append(
            (
                line.name,
                f"{line.value:.4g}",
                line.unit,
                "" if line.ratio is None else f"{line.ratio:.3f}",
                line.against or "",
                line.bar or "",
                verdict,
                line.note or "",
            )
        )
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def keep(lines: list[Line], machine: str, tag: str) -> Path:
    """Append the lines to bench/results/<tag>-<date>.jsonl and return its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{tag}-{date.today().isoformat()}.jsonl"
    with open(path, "a") as file:
        file.write(as_json(lines, machine) + "\n")
    return path
