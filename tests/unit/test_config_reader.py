"""The strict config reader."""

from __future__ import annotations

import math

import pytest

from metrale.config.reader import ConfigReader
from metrale.errors import ConfigError, UnsupportedError


def reader(**mapping) -> ConfigReader:
    return ConfigReader(mapping, "config.json")


def code(error: pytest.ExceptionInfo) -> str:
    return error.value.code


def test_the_first_present_key_that_is_not_null_wins() -> None:
    r = reader(dtype=None, torch_dtype="bfloat16", other="x")
    assert r.str("dtype", "torch_dtype") == "bfloat16"
    assert r.str("nowhere", default="d") == "d"
    assert r.unread() == ("other",)


def test_dotted_keys_reach_into_objects_and_mark_what_they_read() -> None:
    r = reader(rope_parameters={"rope_theta": 5, "strange": 1}, **{"transformers.js_config": {}, "a.b": 3})
    assert r.float("rope_parameters.rope_theta", "rope_theta") == 5.0
    assert r.int("a.b") == 3
    assert r.unread() == ("rope_parameters.strange",)


def test_children_report_their_unread_keys_and_refuse_other_types() -> None:
    r = reader(text_config={"hidden_size": 8, "odd": 1}, vision_config={"x": 1}, architectures=["A"], list=[1])
    child = r.child("text_config")
    assert child is r.child("text_config")
    assert child.int("hidden_size") == 8
    assert r.unread() == ("list", "text_config.odd")
    assert r.child("absent") is None
    with pytest.raises(ConfigError, match=r"config.json: list: expected an object, got \[1\]") as error:
        r.child("list")
    assert code(error) == "config.type"


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("int", "8"),
        ("int", 8.5),
        ("int", True),
        ("int", float("nan")),
        ("float", "x"),
        ("float", False),
        ("bool", 1),
        ("str", 1),
        ("float", {"__float__": 3}),
        ("float", [1.0]),
    ],
)
def test_wrong_types_are_named(method: str, value) -> None:
    with pytest.raises(ConfigError, match=r"config.json: key: expected .*, got ") as error:
        getattr(reader(key=value), method)("key")
    assert code(error) == "config.type"


def test_null_is_named_where_a_value_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"rms_norm_eps: expected a number, got null") as caught:
        reader(rms_norm_eps=None).positive("rms_norm_eps")
    assert caught.value.code == "config.type"
    assert reader(rms_norm_eps=None).positive("rms_norm_eps", default=1e-6) == 1e-6


def test_floats_that_json_cannot_hold() -> None:
    r = reader(a={"__float__": "Infinity"}, b={"__float__": "-Infinity"}, c={"__float__": "NaN"}, d=3, e=4.0)
    assert r.float("a") == math.inf
    assert r.float("b") == -math.inf
    assert math.isnan(r.float("c"))
    assert isinstance(r.float("d"), float)
    assert r.int("e") == 4


def test_missing_keys_suggest_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size: expected a value, got none; did you mean hiden_size\?") as error:
        reader(hiden_size=8).int("hidden_size")
    assert code(error) == "config.missing"


def test_bounds_and_lists() -> None:
    r = reader(n=0, good=[1, 2.0], bad=[1, "x"], text="abc", low=-1.0, inf={"__float__": "Infinity"})
    for call, wanted in (
        (lambda: r.int("n", least=1), "config.value"),
        (lambda: r.positive("low"), "config.value"),
        (lambda: r.positive("inf"), "config.value"),
        (lambda: r.list("bad", of=int), "config.type"),
        (lambda: r.list("text", of=str), "config.type"),
        (lambda: r.list("good", of=float, length=3), "config.value"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert code(error) == wanted
    assert r.list("good", of=float, length=2) == (1.0, 2.0)


def test_expect_refuses_by_name() -> None:
    r = reader(scoring="sigmoid", flag=1, null=None)
    r.expect("absent", "x")
    r.expect("scoring", "softmax", "sigmoid")
    r.expect("null", None, 3)
    with pytest.raises(UnsupportedError, match=r"config.json: scoring: expected 'softmax', got 'sigmoid'; this build") as error:
        r.expect("scoring", "softmax")
    assert code(error) == "config.unsupported"
    with pytest.raises(UnsupportedError):
        r.expect("flag", True)  # 1 is not true
    with pytest.raises(UnsupportedError, match="got null"):
        r.expect("null", False)
    assert r.unread() == ()
