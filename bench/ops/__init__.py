"""Single ops against their ceilings."""

from __future__ import annotations

import argparse

from bench.ops import linear
from bench.report import Line


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every op."""
    linear.arguments(parser)


def run(args: argparse.Namespace) -> list[Line]:
    """Measure every op."""
    return linear.run(args)
