"""Stop strings against a slow, obvious twin."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.errors import RequestError
from metrale.text.stops import StopMatcher, StopStrings


def twin(tokens: list[str], stops: list[str]) -> tuple[str, tuple[str, int, int, int, int] | None]:
    """Return the text shown and where it stopped: look at every prefix of the whole text."""
    text = "".join(tokens)
    owner = [i for i, token in enumerate(tokens) for _ in token]
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            start = end - len(stop)
            return text[:start], (stop, start, end, owner[start], owner[end - 1])
    return text, None


def held_by_twin(text: str, stops: list[str]) -> int:
    """Return how many characters at the end could still become a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def run(tokens: list[str], stops: list[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(StopStrings(stops))
    return [matcher.push(token) for token in tokens], matcher


@given(
    tokens=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=5),
)
def test_equals_the_twin(tokens: list[str], stops: list[str]) -> None:
    shown, matcher = run(tokens, stops)
    text, hit = twin(tokens, stops)
    assert "".join(shown) + matcher.flush() == text
    if hit is None:
        assert matcher.hit is None
    else:
        assert matcher.hit is not None
        stop, start, end, start_token, end_token = hit
        assert matcher.hit == (stop, stops.index(stop), start, end, start_token, end_token)
    assert matcher.flush() == ""


@given(
    tokens=st.lists(st.text("ab", max_size=3), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_holds_back_no_more_and_no_less_than_needed(tokens: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    sent = shown = ""
    for token in tokens:
        sent += token
        shown += matcher.push(token)
        if matcher.hit is not None:
            break
        assert len(sent) - len(shown) == held_by_twin(sent, stops)


@given(text=st.text("abc", max_size=20), cut=st.lists(st.integers(0, 20), max_size=6),
       stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_cut_into_tokens_does_not_matter(text: str, cut: list[int], stops: list[str]) -> None:
    bounds = sorted({0, len(text), *(c for c in cut if c <= len(text))})
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    shown, matcher = run(pieces, stops)
    whole, other = run([text], stops)
    assert "".join(shown) + matcher.flush() == "".join(whole) + other.flush()
    assert (matcher.hit and matcher.hit[:4]) == (other.hit and other.hit[:4])


def test_a_stop_over_three_tokens() -> None:
    shown, matcher = run(["Hello\n", "\nUs", "er", ": no"], ["\n\nUser:"])
    assert shown == ["Hello", "", "", ""]
    assert matcher.hit == ("\n\nUser:", 0, 5, 12, 0, 3)
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_held_text_is_flushed() -> None:
    shown, matcher = run(["a", "<|im", "_"], ["<|im_end|>"])
    assert shown == ["a", "", ""]
    assert matcher.flush() == "<|im_"


def test_first_complete_wins_then_the_longest() -> None:
    assert run(["xabcd"], ["abcd", "bc"])[1].hit[:2] == ("bc", 1)  # type: ignore[index]
    assert run(["xabc"], ["c", "abc", "bc"])[1].hit[:2] == ("abc", 1)  # type: ignore[index]


def test_many_stop_strings() -> None:
    stops = [f"stop{i:05d}" for i in range(5000)]
    shown, matcher = run(["stop0", "stop", "04", "999", "tail"], stops)
    assert "".join(shown) == "stop0"
    assert matcher.hit is not None
    assert (matcher.hit.stop, matcher.hit.which, matcher.hit.end_token) == ("stop04999", 4999, 3)


def test_no_stop_strings() -> None:
    shown, matcher = run(["a", "", "b"], [])
    assert shown == ["a", "", "b"]
    assert matcher.flush() == ""
    assert StopStrings("one").stops == ("one",)


@pytest.mark.parametrize("bad", [[""], ["a", ""], [3], [None], ["\ud800"]])
def test_bad_stop_strings(bad: list[str]) -> None:
    with pytest.raises(RequestError, match="stop: expected") as caught:
        StopStrings(bad)
    assert caught.value.code == "sampling.stop"
