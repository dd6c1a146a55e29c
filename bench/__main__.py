"""Run one benchmark routine and print its table, or with --json one object a line."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench import report

# Routine -> module with `run(args) -> list[Line]` and, when it has options, `arguments(parser)`.
ROUTINES = {
    "cpu": "bench.cpu",
    "ops": "bench.ops",
    "import": "bench.imports",
    "start": "bench.start",
}


def main(argv: list[str] | None = None) -> int:
    """Parse the routine's name and options, run it, print it; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="routine", required=True, metavar="ROUTINE")
    for name, module_name in ROUTINES.items():
        module = importlib.import_module(module_name)
        sub = commands.add_parser(name, help=(module.__doc__ or "").strip().splitlines()[0])
        sub.add_argument("--json", action="store_true", help="one JSON object a line")
        sub.add_argument("--keep", action="store_true", help="also append the lines to bench/results")
        if hasattr(module, "arguments"):
            module.arguments(sub)
    args = parser.parse_args(argv)
    module = importlib.import_module(ROUTINES[args.routine])
    lines = module.run(args)
    machine = report.cpu_name()
    print(report.as_json(lines, machine) if args.json else report.as_table(lines))
    if args.keep:
        print(f"kept in {report.keep(lines, machine, 'cpu')}", file=sys.stderr)
    return 1 if any(line.ok is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
