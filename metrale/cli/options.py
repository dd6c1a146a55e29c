"""Options that several commands share, and how they become an LLM and its sampling parameters."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from metrale.cli.progress import Progress

if TYPE_CHECKING:
    from metrale.api import LLM


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the engine's options."""
    parser.add_argument("model", help="a path, or a name that `metrale pull` fetched")
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "reference", "cuda"), help="where to run (default: %(default)s)"
    )
    group.add_argument(
        "--threads", type=int, default=0, metavar="N", help="CPU threads (default: what the cgroup's quota allows)"
    )
    group.add_argument(
        "--activations",
        default="int8",
        choices=("int8", "f32"),
        help="what quantized weights are multiplied with (default: %(default)s)",
    )
    group.add_argument(
        "--max-context", type=int, metavar="N", help="tokens of prompt and answer together (default: the model's)"
    )


def sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options; what is not given comes from the checkpoint."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: to the end of the context)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the k most likely tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the most likely tokens that hold this probability")
    group.add_argument("--min-p", type=float, metavar="P", help="keep tokens at least this likely relative to the best")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 discourages tokens already seen")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")


def open_llm(args: argparse.Namespace) -> LLM:
    """Open the model with a progress bar on a terminal."""
    from metrale.api import LLM

    with Progress("loading") as bar:
        return LLM(
            args.model,
            device=args.device,
            threads=args.threads,
            activations=args.activations,
            max_context=args.max_context,
            progress=bar.update,
        )


def reading(llm: LLM) -> Progress:
    """Return a bar for the reading of a prompt; one of a single chunk is read before an eye could follow."""
    return Progress("reading", unit=" tokens", above=llm.config.chunk_tokens)


def sampling_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that were given."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    found = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.stop:
        found["stop"] = tuple(args.stop)
    return found


def say(text: str) -> None:
    """Print a remark on stderr when a person watches."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
