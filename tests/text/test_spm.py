"""SentencePiece vocabularies rebuilt from GGUF metadata give SentencePiece's ids."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.text import spm
from metrale.text.tokenizer import Tokenizer
from tests.oracles import oracle_module
from tests.text.corpus import corpus
from tests.text.vocabularies import llama_cpp_of, sentencepiece_metadata, train_sentencepiece, write_gguf

CASES = {"bytes": (True, True), "no-bytes": (False, True), "bytes-no-prefix": (True, False)}
PARTS = ["a", "the", " ", "  ", "\n", "é", "中", "한국", "😀", "ß", "1", "22", "'s", "\u0301", "\t", "der", "ung", "\x01", "."]


@lru_cache
def trained(case: str) -> tuple[Any, Tokenizer, dict[str, Any]]:
    byte_fallback, space_prefix = CASES[case]
    processor = train_sentencepiece(byte_fallback, space_prefix)
    metadata = sentencepiece_metadata(processor, space_prefix)
    return processor, Tokenizer.from_gguf(metadata), metadata


@pytest.mark.parametrize("case", CASES)
def test_ids_equal_sentencepiece(case: str) -> None:
    processor, tokenizer, _ = trained(case)
    for text in corpus():
        assert tokenizer.encode(text, add_special=False, parse_special=False) == processor.encode(text), text


@pytest.mark.parametrize("case", CASES)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
def test_ids_of_random_texts(case: str, parts: list[str]) -> None:
    processor, tokenizer, _ = trained(case)
    text = "".join(parts)
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert ids == processor.encode(text)
    if case != "no-bytes":
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("case", ["bytes", "bytes-no-prefix"])
def test_decoding_equals_sentencepiece(case: str) -> None:
    processor, tokenizer, _ = trained(case)
    for text in corpus():
        ids = processor.encode(text)
        # U+2581 in a text is a space to this kind of vocabulary.
        assert tokenizer.decode(ids) == processor.decode(ids) == text.replace("\u2581", " ")


def test_special_tokens() -> None:
    _, tokenizer, _ = trained("bytes")
    assert tokenizer.encode("")[:1] == [tokenizer.bos_id]
    assert tokenizer.encode("a")[0] == tokenizer.bos_id
    assert tokenizer.eos_ids == (2,)
    parsed = tokenizer.encode("a</s>b", add_special=False)
    # The text after a special token starts with a space of its own, as in llama.cpp.
    assert parsed == [*tokenizer.encode("a", add_special=False), 2, *tokenizer.encode("b", add_special=False)]
    assert 2 not in tokenizer.encode("a</s>b", parse_special=False)
    assert tokenizer.decode([1, *tokenizer.encode("a b", add_special=False), 2], skip_special=True) == "a b"
    assert tokenizer.token_bytes(tokenizer.token_to_id("<0x0A>") or 0) == b"\n"


def test_special_text_cannot_be_merged_from_parts() -> None:
    _, _, metadata = trained("bytes")
    changed = {key: list(value) if isinstance(value, list) else value for key, value in metadata.items()}
    tokens, types, scores = (changed[f"tokenizer.ggml.{k}"] for k in ("tokens", "token_type", "scores"))
    tokens += ["</s", "</"]
    types += [1, 1]
    scores += [-1.0, -1.0]
    assert 2 not in Tokenizer.from_gguf(changed).encode("x</s>", parse_special=False)


def test_user_defined_tokens_are_found_before_merging() -> None:
    _, _, metadata = trained("bytes-no-prefix")
    changed = {key: list(value) if isinstance(value, list) else value for key, value in metadata.items()}
    for key, values in (("tokens", ["   ", "<div>"]), ("token_type", [4, 4]), ("scores", [0.0, 0.0])):
        changed[f"tokenizer.ggml.{key}"] += values
    tokenizer = Tokenizer.from_gguf(changed)
    spaces, div = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    assert tokenizer.encode("a   <div>", add_special=False)[-2:] == [spaces, div]
    assert tokenizer.decode([spaces, div], skip_special=True) == "   <div>"
    assert tokenizer.token_bytes(spaces) == b"   "


def test_merges_follow_the_scores() -> None:
    pieces = ["a", "b", "c", "ab", "bc", "abc"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = spm.merges_from_scores(pieces, [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0], ids, range(6))
    assert merges == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bytes", "bytes-no-prefix"])
def test_live_llama_cpp(case: str, tmp_path: Path) -> None:
    import random

    oracle_module("llama_cpp", why="the judge is in the peers extra")
    _, tokenizer, metadata = trained(case)
    rng = random.Random(7)
    texts = corpus() + ["".join(rng.choice(PARTS) for _ in range(rng.randint(1, 12))) for _ in range(1000)]
    with llama_cpp_of(write_gguf(tmp_path / "v.gguf", metadata)) as judge:
        for text in texts:
            for special in (True, False):
                assert tokenizer.encode(text, False, special) == judge.encode(text, special), text
        for token_id in range(tokenizer.vocab_size):
            assert tokenizer.token_bytes(token_id) == judge.piece(token_id)
