"""Chat templates: a conversation as the text its model was trained on.

Templates are Jinja, rendered as transformers renders them, in Jinja's immutable sandbox with bounds of our own.

Content may be a list of parts. A template that goes through the parts gets the list, as in transformers. Most only print
`content` as a string, and would print a Python list; for those the text parts are joined by line ends. Which kind a
template is, is found by rendering one text part in the message's role.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from metrale.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]

MEDIA = ("image", "audio", "video")  # in the "type" of a part: image, image_url, input_image, ...
PROBE = "a2b3c4d5"  # text that no template writes of its own


class ChatTemplate:
    """The templates of one model and the special tokens they may name.

    templates: Jinja sources by name; "default" is used unless tools are given and there is a "tool_use".
    named_tokens: what ``bos_token``, ``eos_token`` ... stand for in a template.
    """

    def __init__(self, templates: Mapping[str, str] | str, named_tokens: Mapping[str, str] | None = None) -> None:
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.named_tokens = dict(named_tokens or {})

    def __bool__(self) -> bool:
        """Say whether there is a template at all."""
        return bool(self.templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        name: str | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation; begin-of-sequence tokens are in it where the template writes them.

        add_generation_prompt: end with the opening of the assistant's answer. tools, documents: JSON schemas and texts,
        passed on. name: a template other than the usual one. now: what ``strftime_now`` reads, by default the clock.
        variables: anything else the template reads (``enable_thinking``).
        Raises: RequestError ``chat.messages`` for a malformed conversation, ``chat.template`` when there is no template,
        it does not compile, refuses the conversation, fails, or exceeds its bounds; UnsupportedError ``chat.parts`` for
        parts that are images, audio or video, or that the template does not go through and are no text.
        """
        check_messages(messages)
        for label, items in (("tools", tools), ("documents", documents)):
            if items is not None and (isinstance(items, (str, Mapping)) or not all(isinstance(i, Mapping) for i in items)):
                raise RequestError(f"{label}: expected a list of objects, got {items!r:.80}; pass JSON schemas as dicts",
                                   code="chat.messages")
        source = self._source(name, tools)
        template = _compiled(source)
        tokens = tuple(sorted(self.named_tokens.items()))
        given = [m if isinstance(m.get("content"), (str, type(None))) or _takes_parts(source, m["role"], tokens)
                 else _flattened(i, m) for i, m in enumerate(messages)]
        text = _run(template, {
            **self.named_tokens, **variables, "messages": given, "tools": tools, "documents": documents,
            "add_generation_prompt": add_generation_prompt, "strftime_now": (now or datetime.now()).strftime,
        })
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError("messages: expected Unicode text, got a lone surrogate in the rendered conversation; decode the "
                               "input with errors='replace'", code="chat.messages") from error
        return text

    def _source(self, name: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if name is None:
            name = "tool_use" if tools and "tool_use" in self.templates else "default"
        source = self.templates.get(name)
        if source is None:
            known = ", ".join(sorted(self.templates)) or "none"
            raise RequestError(f"chat template {name!r}: expected one of the model's templates, got a name it lacks (it has: "
                               f"{known}); use a chat model, or generate from plain text", code="chat.template")
        return source


def check_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError (``chat.messages``) unless this is a conversation.

    A list of at least one object; each has a "role", a non-empty string, and a "content": a string, a list of objects
    with a "type", or nothing beside tool calls. Raises UnsupportedError ``chat.parts`` for images, audio and video.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages: expected a non-empty list of objects with role and content, got {messages!r:.80}; pass "
                           '[{"role": "user", "content": "..."}]', code="chat.messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(i, "", "an object with role and content", type(message).__name__)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _bad(i, ".role", "a non-empty string", repr(role))
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise _bad(i, ".content", "a string or a list of parts", "nothing")
        if isinstance(content, list):
            for j, part in enumerate(content):
                if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
                    raise _bad(i, f".content[{j}]", 'an object with a "type"', f"{part!r:.80}")
                if any(kind in part["type"] for kind in MEDIA):
                    raise _no_such_part(i, j, part["type"])
                if part["type"] == "text" and not isinstance(part.get("text"), str):
                    raise _bad(i, f".content[{j}].text", "a string", f"{part.get('text')!r:.80}")
        elif content is not None and not isinstance(content, str):
            raise _bad(i, ".content", "a string or a list of parts", type(content).__name__)


def _bad(index: int, where: str, expected: str, got: str) -> RequestError:
    return RequestError(f"messages[{index}]{where}: expected {expected}, got {got}; correct the message", code="chat.messages")


def _no_such_part(index: int, part: int, kind: str) -> UnsupportedError:
    return UnsupportedError(f"messages[{index}].content[{part}]: expected a text part, got {kind!r:.80}, which this build "
                            "cannot read; send text parts only", code="chat.parts")


def _flattened(index: int, message: Message) -> Message:
    """Return a message whose content is the text of its parts, joined by line ends."""
    for j, part in enumerate(message["content"]):
        if part["type"] != "text":
            raise _no_such_part(index, j, part["type"])
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


@lru_cache(maxsize=64)
def _takes_parts(source: str, role: str, named_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Say whether a template goes through the parts of a message of this role, rather than print the list."""
    user, probe = {"role": "user", "content": "x"}, {"role": role, "content": [{"type": "text", "text": PROBE}]}
    messages = [probe] if role == "user" else [probe, user] if role in ("system", "developer") else [user, probe]
    try:
        text = _run(_compiled(source), {
            **dict(named_tokens), "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True,
            "strftime_now": datetime(2000, 1, 1).strftime,
        })
    except RequestError:
        return False
    return PROBE in text and "'type'" not in text and '"type"' not in text


@lru_cache(maxsize=1)
def _environment() -> Any:
    """Build the sandbox once a process; it holds no state of a rendering."""
    from metrale.text.template_environment import build_environment

    return build_environment()


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    """Compile a template; a model has one or two."""
    import jinja2

    try:
        template: Template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"chat template: expected Jinja, got at line {error.lineno}: {error.message}; correct the "
                           "template or pass another", code="chat.template") from error
    except (RecursionError, ValueError, SyntaxError, MemoryError) as error:
        raise RequestError(f"chat template: expected Jinja of reasonable size, got {type(error).__name__}: {error}; pass "
                           "another", code="chat.template") from error
    return template


def _run(template: Template, variables: Mapping[str, Any]) -> str:
    import jinja2

    from metrale.text.template_limits import MAX_LENGTH, LimitExceeded, budget

    try:
        with budget():
            pieces, length = [], 0
            for piece in template.generate(**variables):
                length += len(piece)
                if length > MAX_LENGTH:
                    raise LimitExceeded(f"a text of more than {MAX_LENGTH} characters")
                pieces.append(piece)
            return "".join(pieces)
    except LimitExceeded as error:
        raise RequestError(f"chat template: expected a rendering within bounds, got {error}; correct the template or shorten "
                           "the conversation", code="chat.template") from error
    except jinja2.TemplateError as error:
        raise RequestError(f"chat template: expected a conversation it accepts, got its refusal: {error.message}; change the "
                           "messages or the template", code="chat.template") from error
    except Exception as error:  # a template is a program: it can fail in any way a program can
        raise RequestError(f"chat template: expected to render, got {type(error).__name__}: {error}; change the messages or "
                           "the template", code="chat.template") from error


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, the ``tojson`` filter of chat templates."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=None if indent is None else min(indent, 64),
                      separators=separators, sort_keys=sort_keys)
