"""The environment variables metrale reads: all for debugging, at most sixteen.

Behaviour belongs in `EngineConfig`. `check()` runs when an engine opens and when the command line starts: a misspelt
variable is an error, since ignoring it would silently run something else than was asked for.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import NamedTuple

from metrale.errors import ConfigError


class Variable(NamedTuple):
    """One variable: its default, its allowed values (None: free text) and what it does."""

    default: str
    allowed: tuple[str, ...] | None
    help: str


VARIABLES: dict[str, Variable] = {
    "METRALE_CACHE": Variable("", None, "folder for pulled models and compiled kernels (default: the user's cache folder)"),
    "METRALE_ISA": Variable("", None, "use this CPU instruction set instead of the best one found (see `metrale doctor`)"),
    "METRALE_STRICT": Variable("0", ("0", "1"), "1: declining a fast path is an error instead of a log line"),
    "METRALE_STREAMS": Variable("", ("", "deferred"), "deferred: queue CPU streams, run each as late as its events allow"),
    "METRALE_THREADS": Variable("0", None, "CPU threads of an engine that names none (default: the cgroup's quota)"),
    "METRALE_TRACE": Variable(
        "0", ("0", "1", "2", "3"), "1: log each op and its shapes; 2: wait after each; 3: check finiteness"
    ),
}


def get(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of a known variable.

    Raises: ConfigError (``env.value``) when the value is not among the allowed ones.
    """
    variable = VARIABLES[name]
    value = environ.get(name, variable.default)
    if variable.allowed is not None and value not in variable.allowed:
        shown = ", ".join(repr(v) for v in variable.allowed)
        raise ConfigError(f"{name}: expected one of {shown}, got {value!r}; unset it or correct it", code="env.value")
    return value


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raise on a METRALE_ variable that does not exist, or on a value that is not allowed.

    Raises: ConfigError (``env.unknown``, ``env.value``).
    """
    for name in environ:
        if name.startswith("METRALE_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            remedy = f"did you mean {near[0]}?" if near else "`metrale inspect env` lists the known ones"
            raise ConfigError(f"{name}: expected a known METRALE_ variable, got an unknown one; {remedy}", code="env.unknown")
    for name in VARIABLES:
        get(name, environ)
