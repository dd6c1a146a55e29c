"""`metrale`: parse the command line, run one command, turn errors into one sentence and an exit status.

Exit status: 0 done, 1 a metrale error (its sentence and code on stderr), 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import sys

from metrale import __version__, env
from metrale.errors import MetraleError

# Command -> module with HELP, EXAMPLES, `arguments(parser)` and `run(args) -> int`; imported when it is chosen.
COMMANDS = ("generate", "chat", "inspect", "doctor", "pull")
# What metrale depends on; each package is named like its module.
LIBRARIES = ("numpy", "numba", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "tqdm")
# What writing can end in; an error of a file that cannot be opened or read names it.
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # a reader that has left, or a full disk, is noticed here, not at exit
    except MetraleError as error:
        print(f"metrale: {error} [{error.code}]", file=sys.stderr)
        return 1
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in LIBRARIES:
            raise
        print(
            f"metrale: {package}: expected it to be importable, got: {error}; run `python -m pip install {package}` "
            "[install.missing]",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left (`metrale generate ... | head`): nothing is wrong, and nothing more can be said.
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:
            raise
        print(f"metrale: stdout: expected to take the output, got {error}; write it elsewhere [cli.output]", file=sys.stderr)
        _drop_output()
        return 1


def _drop_output() -> None:
    """Send what waits for stdout nowhere, so that the interpreter's exit does not try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=(logging.WARNING, logging.INFO, logging.DEBUG)[min(args.verbose, 2)],
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    _tolerant_streams()
    if args.command != "doctor":  # which reports a wrong variable beside its other findings
        env.check()
    return int(args.run(args))


def _tolerant_streams() -> None:
    """Make bad bytes in, and characters the terminal cannot show, no crash: the former are refused later, with a sentence."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="metrale", description="A torch-free inference engine for large language models.")
    parser.add_argument("--version", action="version", version=f"metrale {__version__}")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log what happens (-vv: every decision)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"metrale.cli.{name}")
        sub = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"examples:\n{module.EXAMPLES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(sub)
        sub.set_defaults(run=module.run)
    return parser
