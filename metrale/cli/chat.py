"""`metrale chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from metrale.cli.options import model_arguments, open_llm, reading, sampling_arguments, sampling_overrides, say
from metrale.errors import CapacityError, RequestError

if TYPE_CHECKING:
    from metrale.api import LLM

HELP = "talk with a model; Ctrl-C stops an answer, Ctrl-D ends"
EXAMPLES = """  metrale chat smollm2-135m
  metrale chat smollm2-135m --system "You are a pirate." --temperature 0.7"""
COMMANDS = "/reset forgets the conversation, /system TEXT changes the system prompt, /exit ends"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read lines, stream answers, keep the history."""
    history: list[dict[str, str]] = []
    system = args.system
    overrides = sampling_overrides(args)
    with open_llm(args) as llm:
        say(f"{llm.path.name}: {COMMANDS}")
        while (line := _read_line()) is not None:
            command, _, rest = line.strip().partition(" ")
            if not command:
                continue
            if command in ("/exit", "/quit"):
                break
            if command == "/reset":
                history.clear()
            elif command == "/system":
                system = rest.strip() or None
            elif command.startswith("/"):
                print(COMMANDS, file=sys.stderr)
            else:
                _turn(llm, system, history, line, overrides)
    return 0


def _turn(llm: LLM, system: str | None, history: list[dict[str, str]], line: str, overrides: dict[str, Any]) -> None:
    """Answer one line. What was said before Ctrl-C stays in the history; a line that cannot be answered does not."""
    history.append({"role": "user", "content": line.rstrip("\n")})
    opening = [{"role": "system", "content": system}] if system else []
    said: list[str] = []
    try:
        with (
            reading(llm) as bar,
            closing(llm.chat([*opening, *history], stream=True, progress=bar.update, **overrides)) as deltas,
        ):
            for delta in deltas:
                bar.close()
                said.append(delta.text)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(" [stopped]", file=sys.stderr, end="")
    except (CapacityError, RequestError) as error:
        history.pop()
        print(f"{error} [{error.code}]", file=sys.stderr)
        return
    print()
    history.append({"role": "assistant", "content": "".join(said)})


def _read_line() -> str | None:
    """Return the next line, None at the end of input; Ctrl-C at the prompt clears the line."""
    while True:
        try:
            if sys.stdin.isatty():
                import readline  # noqa: F401  gives input() its line editing

                return input("> ")
            line = sys.stdin.readline()
            return line if line else None
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return None
