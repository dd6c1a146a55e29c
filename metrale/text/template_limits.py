"""Bounds on what a chat template may do: a checkpoint's template is code from a stranger.

Jinja's sandbox stops access to Python's insides and caps one `range`. It does not stop nested loops, recursive macros or
strings that double; here every loop turn and macro call is counted, and operations that can build something huge are
refused before they do. A deadline catches what costs much in few steps.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

MAX_STEPS = 100_000  # loop turns and macro calls of one rendering; a conversation takes hundreds
MAX_SECONDS = 10.0  # of one rendering; real ones take milliseconds
MAX_LENGTH = 1 << 24  # characters or items of anything a template builds
MAX_BITS = 1 << 12  # of an integer
_GROWING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_SIZED_FILTERS = ("center", "indent", "slice", "batch", "wordwrap", "truncate", "round")


class LimitExceeded(Exception):
    """A template went past a bound; the message says which."""


@dataclass(slots=True)
class _Budget:
    steps: int
    deadline: float


_budget: ContextVar[_Budget | None] = ContextVar("metrale_template_budget", default=None)


@contextmanager
def budget() -> Iterator[None]:
    """Count the steps of one rendering; each thread and task has its own count."""
    token = _budget.set(_Budget(MAX_STEPS, time.monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        _budget.reset(token)


def tick(steps: int = 1) -> str:
    """Count loop turns or macro calls; returns "", so that a template can call it.

    Raises: LimitExceeded when the budget is used up.
    """
    left = _budget.get()
    if left is not None:
        left.steps -= steps
        if left.steps < 0:
            raise LimitExceeded(f"more than {MAX_STEPS} loop turns")
        if time.monotonic() > left.deadline:
            raise LimitExceeded(f"more than {MAX_SECONDS:.0f} seconds")
    return ""


def check_length(length: int) -> None:
    """Raise LimitExceeded for a string or list that would be longer than MAX_LENGTH."""
    if length > MAX_LENGTH:
        raise LimitExceeded(f"a value of more than {MAX_LENGTH} characters or items")


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse a binary operation whose result would be huge, before it is computed."""
    if operator == "+":
        if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            check_length(len(left) + len(right))
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                check_length(len(sequence) * count)
        _check_bits(left, right, 1)
    elif operator == "**" and isinstance(right, int):
        _check_bits(left, 0, max(right, 1))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)


def check_method(method: Any, arguments: Sequence[Any]) -> None:
    """Refuse string methods that pad or multiply past the limit."""
    inner = getattr(method, "__wrapped__", method)  # the sandbox wraps str.format
    owner, name = getattr(inner, "__self__", None), getattr(inner, "__name__", "")
    if not isinstance(owner, str):
        return
    if name in _GROWING_METHODS:
        for argument in arguments:
            if isinstance(argument, int):
                check_length(argument if name != "expandtabs" else argument * (owner.count("\t") + 1))
    elif name == "replace" and len(arguments) >= 2 and all(isinstance(a, str) for a in arguments[:2]):
        old, new = arguments[:2]
        check_length(len(owner) + (owner.count(old) if old else len(owner) + 1) * len(new))
    elif name == "join" and arguments and isinstance(arguments[0], (list, tuple)):
        check_length(len(owner) * len(arguments[0]) + sum(len(item) for item in arguments[0] if isinstance(item, str)))
    elif name in ("format", "format_map"):
        _check_format(owner)


def bounded_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the filters whose integer arguments size their result, each with a check before it."""
    return {name: _bounded(filters[name]) for name in _SIZED_FILTERS if name in filters}


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the marks that tell Jinja to pass its environment or context
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, int) and value > 10_000:
                raise LimitExceeded(f"{function.__name__} with the argument {value}")
        return function(*args, **kwargs)

    return checked


def _check_bits(left: Any, right: Any, times: int) -> None:
    if isinstance(left, int) and isinstance(right, int) and (left.bit_length() + right.bit_length()) * times > MAX_BITS:
        raise LimitExceeded(f"an integer of more than {MAX_BITS} bits")


def _check_format(pattern: str) -> None:
    """Refuse widths and precisions of more than five digits."""
    if re.search(r"[%{:][^%{}]*\d{6,}", pattern) or ("*" in pattern and "%" in pattern):
        raise LimitExceeded("a format with a huge or computed width")
