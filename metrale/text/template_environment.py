"""The Jinja environment of chat templates; imports jinja2, so it is itself imported when a template is rendered.

Source: transformers utils/chat_template_utils.py for what a template may count on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from metrale.text.chat import to_json
from metrale.text.template_limits import bounded_filters, check_length, check_method, check_operation, tick

_TICK = "metrale_tick"
_CONCAT = "metrale_concat"


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's text for training; here its body is simply part of the text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own, which is what transformers' call block gives it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with counted loops and checked growth."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of a result before it is computed."""
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments of methods that size their result."""
        check_method(obj, args)
        return super().call(context, obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _counted(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree


def _counted(tree: nodes.Template) -> nodes.Template:
    """Put a tick at the head of every loop body, macro and call block, and make ``~`` check its length."""
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
        for found in list(tree.find_all(kind)):
            node: Any = found  # the three have a body, their common base has none
            line = node.lineno
            count = nodes.Call(nodes.Name(_TICK, "load", lineno=line), [], [], None, None, lineno=line)
            node.body.insert(0, nodes.ExprStmt(count, lineno=line))
    _replace_concat(tree)
    return tree


def _replace_concat(node: nodes.Node) -> None:
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, field, [_concat_call(item) for item in value])
        else:
            setattr(node, field, _concat_call(value))


def _concat_call(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concat(value)
    if isinstance(value, nodes.Concat):
        line = value.lineno
        return nodes.Call(nodes.Name(_CONCAT, "load", lineno=line), value.nodes, [], None, None, lineno=line)
    return value


def _concat(*values: Any) -> str:
    texts = [str(value) for value in values]
    check_length(sum(map(len, texts)))
    return "".join(texts)


def _range(*args: int) -> range:
    """Return a range no longer than the sandbox allows, counted: building lists of it is work without a loop."""
    numbers = safe_range(*args)
    tick(len(numbers) // 16)
    return numbers


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _bounded_join(join: Callable[..., str]) -> Callable[..., str]:
    """Wrap the ``join`` filter: a long separator between many items is the one filter that multiplies."""
    @wraps(join)
    def checked(eval_ctx: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items = list(value)
        check_length(len(items) * len(str(d)) + sum(len(item) for item in items if isinstance(item, str)))
        return join(eval_ctx, items, d, attribute)

    return checked


def build_environment() -> jinja2.Environment:
    """Return the environment; it holds no state of a rendering and may be shared between threads."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters.update(bounded_filters(environment.filters))
    environment.filters["join"] = _bounded_join(environment.filters["join"])
    environment.filters["tojson"] = to_json
    environment.globals.pop("lipsum", None)  # text of any length, useful to no template
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["range"] = _range
    environment.globals[_TICK] = tick
    environment.globals[_CONCAT] = _concat
    return environment
