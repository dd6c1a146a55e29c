"""Single ops against their ceilings."""

from __future__ import annotations

import argparse

from bench.ops import attention, linear
from bench.report import Line


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, which all ops share."""
    linear.arguments(parser)


def run(args: argparse.Namespace) -> list[Line]:
    """Measure every op."""
    return linear.run(args) + attention.run(args)
