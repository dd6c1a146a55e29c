"""Byte-level vocabularies rebuilt from GGUF metadata give llama.cpp's ids, whatever pre-tokenizer they name."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.errors import UnsupportedError
from metrale.text import pretokenizers
from metrale.text.tokenizer import Tokenizer
from tests.oracles import oracle_module
from tests.text.corpus import HERE, corpus
from tests.text.vocabularies import PRE_NAMES, comparable, llama_cpp_of, small_bpe, write_gguf

TRICKY = ["a", "É", "é", "ß", "ǅ", "中", "한", "ก", "ि", "\u0301", "1", "23", "½", "٣", " ", "  ", "\n", "\r\n", "\t", "\xa0",
          "\u3000", "\x85", "\u200b", "'s", "'LL", "'", "-", "_", "/", "::", "😀", "\u200d", "\x00", "<|im_end|>",
          "<s>", "$", "+", "。"]


def goldens() -> dict[str, Any]:
    return json.loads((HERE / "goldens.json").read_text(encoding="utf-8"))


@lru_cache
def tokenizer(pre: str) -> Tokenizer:
    return Tokenizer.from_gguf(small_bpe(pre))


@pytest.mark.parametrize("pre", PRE_NAMES)
def test_ids_equal_llama_cpp(pre: str) -> None:
    expected = goldens()[f"pre:{pre}"]
    texts = corpus()
    assert len(expected) == len(texts)
    compared = 0
    for text, ids in zip(texts, expected, strict=True):
        if ids is not None:
            compared += 1
            assert tokenizer(pre).encode(text, add_special=False) == ids, text
    assert compared > 30


def test_every_set_of_expressions_has_its_goldens() -> None:
    covered = {pretokenizers.find(name).patterns for name in PRE_NAMES}
    assert covered == {pretokenizers.find(name).patterns for name in pretokenizers.known_names()}


def test_pre_tokenizers_differ() -> None:
    text = "AbcDEF's 1234 ,,\n x/y\u0301é"
    splits = {tuple(tokenizer(pre).encode(text, add_special=False)) for pre in PRE_NAMES}
    assert len(splits) > 4


def test_cased_classes_are_the_familys_own() -> None:
    # Mistral's expression breaks before a capital after small letters, in any script.
    spec = pretokenizers.build(pretokenizers.find("tekken"))
    pieces = [piece for piece, _ in spec.pre_tokenize_str("étéÉTÉ abcDEF")]
    assert len(pieces) == 4


@pytest.mark.parametrize("pre", PRE_NAMES)
@given(parts=st.lists(st.sampled_from(TRICKY) | st.characters(exclude_categories=["Cs"]), max_size=12))
def test_round_trip(pre: str, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer(pre).encode(text, add_special=False)
    assert tokenizer(pre).decode(ids) == text
    assert b"".join(map(tokenizer(pre).token_bytes, ids)) == text.encode()


def test_unknown_name_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre: expected one of .*qwen2.*, got 'klingon'") as caught:
        Tokenizer.from_gguf(small_bpe("klingon"))
    assert caught.value.code == "tokenizer.pre"


@pytest.mark.slow
@pytest.mark.parametrize("pre", PRE_NAMES)
def test_fuzz_against_llama_cpp(pre: str, tmp_path: Path) -> None:
    """Thousands of tricky texts, live."""
    import random

    oracle_module("llama_cpp", why="the judge is in the peers extra")
    rng = random.Random(pre)
    with llama_cpp_of(write_gguf(tmp_path / "v.gguf", small_bpe(pre))) as judge:
        for _ in range(2000):
            text = "".join(rng.choice(TRICKY) for _ in range(rng.randint(1, 12)))
            if comparable(pre, text):
                for special in (True, False):
                    ids = tokenizer(pre).encode(text, add_special=False, parse_special=special)
                    assert ids == judge.encode(text, special), text
        for token_id in range(tokenizer(pre).vocab_size):
            assert tokenizer(pre).token_bytes(token_id) == judge.piece(token_id)
