"""Chat templates render as transformers renders them, and misbehaving ones end in an error."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from metrale.errors import RequestError, UnsupportedError
from metrale.text.chat import ChatTemplate
from tests.oracles import oracle_module
from tests.text.templates import NAMED, TEMPLATES

USER = {"role": "user", "content": "What is <b> & \"c\"?\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief. "}, USER],
    "turns": [USER, {"role": "assistant", "content": "  A letter. "}, {"role": "user", "content": "日本語 😀 é"}],
    "empty": [{"role": "user", "content": ""}],
    "call": [
        {"role": "system", "content": "You have tools."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}]},
        {"role": "tool", "content": '{"temp": 3}'},
    ],
}
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Say <how> it is & \"will\" be.",
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"],
    },
}}]


def by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """Return transformers' rendering, or None where the template refuses the conversation."""
    import jinja2
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=source, **NAMED)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except jinja2.TemplateError:
        return None


@pytest.mark.oracle
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_equals_transformers(family: str, conversation: str) -> None:
    oracle_module("transformers", why="the oracle is not installed")
    source, messages = TEMPLATES[family], CONVERSATIONS[conversation]
    for prompt in (True, False):
        for tools in (None, TOOLS):
            expected = by_transformers(source, messages, add_generation_prompt=prompt, tools=tools)
            if expected is None:
                with pytest.raises(RequestError) as caught:
                    ChatTemplate(source, NAMED).render(messages, add_generation_prompt=prompt, tools=tools)
                assert caught.value.code == "chat.template"
            else:
                assert ChatTemplate(source, NAMED).render(messages, add_generation_prompt=prompt, tools=tools) == expected


def test_what_the_families_make_of_one_conversation() -> None:
    # Fixed here too, for the Pythons without the oracle.
    expected = {
        "smollm2": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                   "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
                  "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "gemma": "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
        "mistral": "<s>[INST] hi [/INST]",
    }
    for family, text in expected.items():
        assert ChatTemplate(TEMPLATES[family], NAMED).render([{"role": "user", "content": "hi"}]) == text


def test_refused_system_role() -> None:
    with pytest.raises(RequestError, match="its refusal: System role not supported; change the messages") as caught:
        ChatTemplate(TEMPLATES["gemma"], NAMED).render(CONVERSATIONS["system"])
    assert caught.value.code == "chat.template"


def test_variables_time_and_named_templates() -> None:
    template = ChatTemplate({
        "default": "{{ strftime_now('%d %b %Y') }}|{{ enable_thinking }}|{{ documents[0].title }}",
        "tool_use": "tools: {{ tools|length }}",
    })
    rendered = template.render([USER], documents=[{"title": "T"}], enable_thinking=False, now=datetime(2026, 12, 1))
    assert rendered == "01 Dec 2026|False|T"
    assert template.render([USER], tools=TOOLS) == "tools: 1"
    assert template.render([USER], name="tool_use", tools=TOOLS) == "tools: 1"
    with pytest.raises(RequestError, match=r"chat template 'rag': expected one of the model's templates"):
        template.render([USER], name="rag")


def test_no_template() -> None:
    assert not ChatTemplate({})
    with pytest.raises(RequestError, match="it has: none") as caught:
        ChatTemplate({}).render([USER])
    assert caught.value.code == "chat.template"


def test_generation_tag_and_loop_controls() -> None:
    source = ("{% set x = 1 %}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
              "{% generation %}{% set x = 2 %}[{{ m.content }}]{% endgeneration %}{{ x }}{% endfor %}")
    assert ChatTemplate(source).render([{"role": "user", "content": str(i)} for i in range(4)]) == "[0]1[1]1"


def test_messages_cannot_be_changed() -> None:
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError):
        ChatTemplate("{{ messages.append(1) }}").render(messages)
    with pytest.raises(RequestError):
        ChatTemplate("{{ messages[0].update({'role': 'x'}) }}").render(messages)
    assert messages == [{"role": "user", "content": "a"}]


PARTS = [{"type": "text", "text": "look: "}, {"type": "text", "text": "here"}]
GOES_THROUGH = ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
                "{{ part.text if part.type == 'text' else '<' + part.type + '>' }}{% endfor %}{% endif %}{% endfor %}")


def test_content_parts_reach_a_template_that_goes_through_them() -> None:
    assert ChatTemplate(GOES_THROUGH).render([{"role": "user", "content": PARTS}]) == "look: here"
    mixed = [*PARTS, {"type": "citation", "of": "x"}]
    assert ChatTemplate(GOES_THROUGH).render([{"role": "user", "content": mixed}]) == "look: here<citation>"


@pytest.mark.parametrize("family", TEMPLATES)
def test_text_parts_are_joined_for_a_template_that_prints_content(family: str) -> None:
    template = ChatTemplate(TEMPLATES[family], NAMED)
    parted, joined = [{"role": "user", "content": PARTS}], [{"role": "user", "content": "look: \nhere"}]
    assert template.render(parted) == template.render(joined)
    assert parted[0]["content"] == PARTS
    for role in ("system", "assistant"):
        parted, joined = ([{"role": role, "content": PARTS}, USER], [{"role": role, "content": "look: \nhere"}, USER])
        if role == "assistant":
            parted, joined = [USER, parted[0]], [USER, joined[0]]
        try:
            expected = template.render(joined)
        except RequestError:
            continue  # a role this template refuses
        assert template.render(parted) == expected


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_media_parts_are_refused_by_name(kind: str) -> None:
    for source in (GOES_THROUGH, TEMPLATES["smollm2"]):
        with pytest.raises(UnsupportedError, match=rf"messages\[0\]\.content\[2\]: expected .*, got '{kind}'") as caught:
            ChatTemplate(source, NAMED).render([{"role": "user", "content": [*PARTS, {"type": kind}]}])
        assert caught.value.code == "chat.parts"


def test_other_parts_are_refused_where_they_would_be_lost() -> None:
    with pytest.raises(UnsupportedError, match="got 'citation'") as caught:
        ChatTemplate(TEMPLATES["smollm2"], NAMED).render([{"role": "user", "content": [{"type": "citation"}]}])
    assert caught.value.code == "chat.parts"


@pytest.mark.parametrize(("messages", "said"), [
    ([], "non-empty list"),
    ("hi", "non-empty list"),
    ({"role": "user", "content": "a"}, "non-empty list"),
    (None, "non-empty list"),
    (["hi"], r"messages\[0\]: expected an object"),
    ([{"content": "a"}], r"messages\[0\]\.role: expected a non-empty string, got None"),
    ([{"role": 3, "content": "a"}], r"messages\[0\]\.role"),
    ([{"role": "", "content": "a"}], r"messages\[0\]\.role"),
    ([USER, {"role": "user"}], r"messages\[1\]\.content: expected a string or a list of parts, got nothing"),
    ([{"role": "assistant", "content": None}], r"messages\[0\]\.content"),
    ([{"role": "user", "content": 5}], r"messages\[0\]\.content: expected a string or a list of parts, got int"),
    ([{"role": "user", "content": b"a"}], "got bytes"),
    ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\]: expected an object"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"content\[0\]\.text: expected a string, got 1"),
    ([{"role": "user", "content": "\ud83d"}], "lone surrogate"),
])
def test_bad_messages(messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        ChatTemplate(TEMPLATES["smollm2"]).render(messages)
    assert caught.value.code == "chat.messages"


def test_bad_tools() -> None:
    for tools in ("x", [3], {"a": 1}):
        with pytest.raises(RequestError, match="tools: expected a list of objects") as caught:
            ChatTemplate(TEMPLATES["smollm2"]).render([USER], tools=tools)  # type: ignore[arg-type]
        assert caught.value.code == "chat.messages"


@pytest.mark.parametrize("source", [
    "{% for",
    "{{ 'a' }",
    "{% nonsense %}",
    "{{ undefined.attribute }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].content + 1 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{% include 'x' %}",
    "{{ lipsum(n=100000000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ '" + "(" * 300 + "' }}{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
])
def test_failing_templates(source: str) -> None:
    with pytest.raises(RequestError, match="chat template: expected") as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.code == "chat.template"


@pytest.mark.parametrize("source", [
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
    "{% for i in range(100001) %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(100) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=3) %}{% for i in range(100) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'x' * 1000000000 }}",
    "{{ [0] * 1000000000 }}",
    "{{ 9 ** 9 ** 9 ** 99 }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ 'a'|center(1000000000) }}",
    "{{ 'a\nb'|indent(1000000000) }}",
    "{{ [1]|batch(1000000000, 0)|list }}",
    "{{ [1]|slice(1000000000)|list }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "{{ ('a' * 10000).join(range(10000)|map('string')|list) }}",
    "{{ range(10000)|join('b' * 10000) }}",
    "{% for i in range(20000) %}{{ 'x' * 10000 }}{% endfor %}",
])
def test_templates_that_would_not_end(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.code == "chat.template"


def test_a_long_conversation_is_within_bounds() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 50} for i in range(4001)]
    for family in ("smollm2", "llama3", "mistral"):
        assert len(ChatTemplate(TEMPLATES[family], NAMED).render(messages)) > 1_000_000
