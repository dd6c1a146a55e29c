"""Streamed text equals decoded text, and no piece holds half a character."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.errors import RequestError
from metrale.text.detokenizer import Detokenizer
from metrale.text.tokenizer import Tokenizer
from tests.text.corpus import corpus
from tests.text.vocabularies import sentencepiece_metadata, small_bpe, train_sentencepiece

KINDS = ("bpe", "spm", "spm-no-prefix")


@lru_cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "bpe":
        return Tokenizer.from_gguf(small_bpe("smollm"))
    prefix = kind == "spm"
    return Tokenizer.from_gguf(sentencepiece_metadata(train_sentencepiece(True, prefix), prefix))


class ByteTokens:
    """Tokens 0 to 255 are the bytes; 256 to 299 are drawn strings of bytes, 300 is special."""

    vocab_size = 301
    special_ids = frozenset({300})

    def __init__(self, strip_space: bool, longer: list[bytes]) -> None:
        self.strip_space = strip_space
        self._longer = longer

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return b"<s>" if token_id == 300 else self._longer[(token_id - 256) % len(self._longer)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [False, True])
@given(data=st.data())
def test_streamed_equals_decoded(kind: str, skip_special: bool, data: st.DataObject) -> None:
    model = tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5).map(sorted))
    detokenizer = Detokenizer(model, skip_special)
    bounds = [0, *cuts, len(ids)]
    pieces = [detokenizer.push_all(ids[a:b]) for a, b in pairwise(bounds)]
    assert "".join(pieces) + detokenizer.flush() == model.decode(ids, skip_special)
    assert detokenizer.flush() == ""


@given(
    ids=st.lists(st.integers(0, 300), max_size=60),
    longer=st.lists(st.binary(max_size=6), min_size=1, max_size=8),
    strip=st.booleans(),
)
def test_any_bytes(ids: list[int], longer: list[bytes], strip: bool) -> None:
    model = ByteTokens(strip, longer)
    whole = b"".join(model.token_bytes(i) for i in ids if i != 300)
    if strip and whole.startswith(b" "):
        whole = whole[1:]
    detokenizer = Detokenizer(model)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == whole.decode("utf-8", errors="replace")


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_character_comes_whole_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(ByteTokens(False, [b""]))
    for character in text:
        *first, last = character.encode()
        assert [detokenizer.push(byte) for byte in first] == [""] * len(first)
        assert detokenizer.push(last) == character
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_corpus_streams(kind: str) -> None:
    model = tokenizer(kind)
    for text in corpus():
        detokenizer = Detokenizer(model, skip_special=False)
        pieces = [detokenizer.push(i) for i in model.encode(text, False, parse_special=False)]
        expected = text if kind == "bpe" else text.replace("\u2581", " ")
        assert "".join(pieces) == expected, text
        assert detokenizer.flush() == ""


def test_incomplete_tail_and_invalid_bytes() -> None:
    detokenizer = Detokenizer(ByteTokens(False, [b""]))
    assert [detokenizer.push(b) for b in (0xE2, 0x82, ord("a"))] == ["", "", "\ufffda"]
    assert [detokenizer.push(b) for b in (0xFF, 0xF0, 0x9F)] == ["\ufffd", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_leading_space() -> None:
    model = tokenizer("spm")
    ids = [model.bos_id or 0, *model.encode(" two", add_special=False)]
    detokenizer = Detokenizer(model)
    assert detokenizer.push_all(ids) == " two"  # the tokenizer's own space went, the text's own stayed
    ids = model.encode("a b", add_special=False)
    assert Detokenizer(model, continues=True).push_all(ids) == " a b"
    shown = Detokenizer(model, skip_special=False)
    assert shown.push_all([1, *ids]) == "<s> a b"  # nothing to strip after a visible token
    assert Detokenizer(tokenizer("spm-no-prefix")).push_all(tokenizer("spm-no-prefix").encode(" x", False)) == " x"


def test_ids_out_of_range() -> None:
    model = tokenizer("bpe")
    detokenizer = Detokenizer(model)
    assert detokenizer.push(model.vocab_size) == ""  # a padding row of the model
    with pytest.raises(RequestError, match=r"token id: expected 0 to \d+, got -1"):
        detokenizer.push(-1)
    assert detokenizer.push_all(model.encode("still usable", False)) == "still usable"
