"""SmolLM2's tokenizer, from the pulled GGUF file, gives llama.cpp's ids over the corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metrale import hub
from metrale.formats.gguf import open_gguf
from metrale.text.pieces import byte_characters
from metrale.text.tokenizer import Tokenizer
from tests.oracles import oracle_module
from tests.text.corpus import HERE, corpus
from tests.text.vocabularies import llama_cpp_of

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def path() -> Path:
    return hub.pull("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    with open_gguf(path) as checkpoint:
        return Tokenizer.from_gguf(checkpoint.metadata)


def test_ids_equal_llama_cpp(tokenizer: Tokenizer) -> None:
    goldens = json.loads((HERE / "goldens.json").read_text(encoding="utf-8"))
    texts = corpus()
    assert len(texts) >= 60
    assert len(goldens["smollm2"]) == len(texts)
    plain_differs = 0
    for i, (text, ids) in enumerate(zip(texts, goldens["smollm2"], strict=True)):
        assert tokenizer.encode(text) == ids, text
        plain = goldens["smollm2_plain"].get(str(i), ids)
        plain_differs += plain != ids
        assert tokenizer.encode(text, parse_special=False) == plain, text
        # The vocabulary lacks 21 of the 256 bytes; what is spelled with them is lost, in llama.cpp too.
        kept = bytes(b for b in text.encode() if tokenizer.token_to_id(byte_characters()[b]) is not None)
        assert tokenizer.decode(ids) == tokenizer.decode(plain) == kept.decode(errors="replace")
        assert kept == text.encode() or "\U00050000" in text
    assert plain_differs >= 3
    assert tokenizer.encode_batch(texts) == goldens["smollm2"]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids[0] == 2  # <|im_end|>
    assert tokenizer.token_to_id("<|endoftext|>") in tokenizer.eos_ids
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.encode("") == []  # the file says: no begin token
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_chat(tokenizer: Tokenizer) -> None:
    text = tokenizer.chat_template.render([{"role": "user", "content": "Hi"}])
    assert text == ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_live_llama_cpp(tokenizer: Tokenizer, path: Path) -> None:
    oracle_module("llama_cpp", why="the judge is in the peers extra")
    with llama_cpp_of(path) as judge:
        for text in corpus():
            for special in (True, False):
                assert tokenizer.encode(text, parse_special=special) == judge.encode(text, special), text
        for token_id in range(tokenizer.vocab_size):
            assert tokenizer.token_bytes(token_id) == judge.piece(token_id)
