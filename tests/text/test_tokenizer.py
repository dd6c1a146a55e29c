"""Bad input to tokenizers: an error of the right class and code, and the tokenizer usable afterwards."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from metrale.errors import ConfigError, RequestError, UnsupportedError
from metrale.formats.gguf import open_gguf
from metrale.text.tokenizer import Tokenizer
from tests.text.corpus import corpus
from tests.text.vocabularies import sentencepiece_metadata, small_bpe, train_sentencepiece, write_gguf


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(small_bpe("qwen2"))


def changed(**keys: Any) -> dict[str, Any]:
    """Return the small vocabulary with some keys changed, or removed when None."""
    metadata = small_bpe("qwen2") | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40, 1.5, "1", None, True])
def test_token_id_out_of_range(tokenizer: Tokenizer, token_id: Any) -> None:
    for call in (tokenizer.token_bytes, tokenizer.id_to_token, lambda i: tokenizer.decode([3, i])):
        with pytest.raises(RequestError, match="token id: expected") as caught:
            call(token_id)
        assert caught.value.code == "token.range"
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"


def test_numpy_ids(tokenizer: Tokenizer) -> None:
    import numpy as np

    ids = np.asarray(tokenizer.encode("fine 😀"), dtype=np.int32)
    assert tokenizer.decode(ids) == "fine 😀"
    assert tokenizer.id_to_token(ids[0]) == tokenizer.id_to_token(int(ids[0]))


@pytest.mark.parametrize(("text", "said"), [
    ("a\ud800b", r"lone surrogate U\+D800 at character 1"),
    ("\udfff", r"lone surrogate U\+DFFF at character 0"),
    (b"bytes", "expected a string, got bytes"),
    (None, "expected a string, got NoneType"),
    (["a"], "expected a string, got list"),
])
def test_bad_text(tokenizer: Tokenizer, text: Any, said: str) -> None:
    for call in (tokenizer.encode, lambda t: tokenizer.encode_batch(["fine", t]), tokenizer.token_to_id):
        with pytest.raises(RequestError, match=said) as caught:
            call(text)
        assert caught.value.code == "prompt.text"
    with pytest.raises(RequestError, match="expected a list of strings"):
        tokenizer.encode_batch("one")
    assert tokenizer.encode("fine", add_special=False)


def test_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.encode("", parse_special=False) == []
    assert tokenizer.encode_batch(["", ""]) == [[], []]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode([]) == ""
    assert tokenizer.token_to_id("") is None


def test_special_tokens_in_text(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b<empty_output>c"
    end, user = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<empty_output>")
    parsed, plain = tokenizer.encode(text), tokenizer.encode(text, parse_special=False)
    assert end in parsed
    assert end not in plain
    assert user in parsed
    assert user in plain  # user-defined tokens are ordinary words, found in any text
    assert tokenizer.decode(parsed) == tokenizer.decode(plain) == text
    assert tokenizer.decode(parsed, skip_special=True) == "ab<empty_output>c"
    assert end not in tokenizer.encode(text, parse_special=False)  # and so after another call


def test_padding_tokens_add_nothing(tokenizer: Tokenizer) -> None:
    pad = tokenizer.token_to_id("[PAD0]")
    assert pad == tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(pad) == b""


def test_bos_and_eos(tokenizer: Tokenizer) -> None:
    both = Tokenizer.from_gguf(changed(add_bos_token=True, add_eos_token=True))
    assert both.encode("") == [1, 2]
    assert both.encode("a", add_special=False) == tokenizer.encode("a")
    assert Tokenizer.from_gguf(small_bpe("llama-bpe")).encode("")[0] == 1  # that family begins texts unless told not to
    none = Tokenizer.from_gguf(changed(bos_token_id=None, eos_token_id=None))
    assert (none.bos_id, none.eos_ids) == (None, (0, 2))  # <|endoftext|> and <|im_end|> end answers anyway
    assert tokenizer.eos_ids == (2, 0)


def test_end_of_answer_texts_are_control_tokens_whatever_their_type() -> None:
    types = small_bpe("qwen2")["tokenizer.ggml.token_type"]
    types[2] = 1
    assert 2 in Tokenizer.from_gguf(changed(token_type=types)).special_ids


def test_harmony_end_is_not_the_end() -> None:
    metadata = small_bpe("gpt-4o")
    metadata["tokenizer.ggml.tokens"] += ["<|end|>", "<|return|>", "<|call|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.id_to_token(i) for i in tokenizer.eos_ids] == ["<|im_end|>", "<|endoftext|>", "<|return|>", "<|call|>"]


@pytest.mark.parametrize(("keys", "said"), [
    ({"tokens": None}, "tokens: expected an array of strings, got no such key"),
    ({"tokens": []}, "tokens: expected at least one token"),
    ({"tokens": "abc"}, "tokens: expected an array, got str"),
    ({"tokens": ["a", 1]}, "tokens: expected an array of strings, got other values"),
    ({"tokens": ["a", "b", "a"], "token_type": None}, "tokens: expected distinct tokens, got 'a' twice"),
    ({"tokens": ["a", "\ud800"], "token_type": None, "merges": []}, "expected UTF-8 text"),
    ({"token_type": [1, 1]}, r"token_type: expected \d+ numbers, one a token, got 2"),
    ({"token_type": ["x"] * 9999}, "token_type: expected an array of numbers"),
    ({"token_type": 3}, "token_type: expected an array, got int"),
    ({"merges": None}, "merges: expected an array of strings, got no such key"),
    ({"merges": ["ab"]}, "merges: expected two tokens and a space a line"),
    ({"merges": ["a q9"]}, "merges: expected pairs of tokens"),
    ({"merges": ["x y", "q q7"]}, "merges: expected pairs of tokens"),
    ({"bos_token_id": 10**6}, r"bos_token_id: expected a token id below \d+, got 1000000"),
    ({"bos_token_id": -7}, r"bos_token_id: expected a token id below \d+, got -7"),
    ({"eos_token_id": "2"}, "eos_token_id: expected a token id, got '2'"),
    ({"eos_token_id": 2.0}, "eos_token_id: expected a token id"),
    ({"add_bos_token": "yes"}, "add_bos_token: expected true or false"),
    ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token: expected a file that names the token to add"),
    ({"pre": 5}, "pre: expected a string, got int"),
    ({"model": None}, "model: expected a string, got no such key"),
])
def test_bad_metadata(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Tokenizer.from_gguf(changed(**keys))
    assert caught.value.code == "tokenizer.gguf"


def test_metadata_as_the_reader_gives_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", small_bpe("qwen2"))
    with open_gguf(path) as checkpoint:
        read = Tokenizer.from_gguf(checkpoint.metadata)
    built = Tokenizer.from_gguf(small_bpe("qwen2"))
    assert [read.encode(text) for text in corpus()] == [built.encode(text) for text in corpus()]
    # A merge that is not UTF-8: "Ġ" is two bytes in the file, one of them is overwritten.
    data = path.read_bytes()
    at = data.index("Ġ".encode(), data.index(b"tokenizer.ggml.merges"))
    path.write_bytes(data[: at + 1] + b"(" + data[at + 2 :])
    with open_gguf(path) as checkpoint, pytest.raises(ConfigError, match="merges: expected UTF-8 text"):
        Tokenizer.from_gguf(checkpoint.metadata)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "none", ""])
def test_unknown_models_are_refused_by_name(model: str) -> None:
    with pytest.raises(UnsupportedError, match=f"expected 'gpt2' or 'llama', got '{model}'") as caught:
        Tokenizer.from_gguf(changed(model=model))
    assert caught.value.code == "tokenizer.model"


def test_sentencepiece_without_scores() -> None:
    metadata = sentencepiece_metadata(train_sentencepiece(True))
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ConfigError, match="scores: expected a score a token, got no such key"):
        Tokenizer.from_gguf(metadata)


def test_ids_that_say_none() -> None:
    assert Tokenizer.from_gguf(changed(bos_token_id=0xFFFFFFFF)).bos_id is None
    assert Tokenizer.from_gguf(changed(bos_token_id=-1)).bos_id is None


def test_empty_tokens_get_names() -> None:
    metadata = small_bpe("qwen2")
    metadata["tokenizer.ggml.tokens"] += ["", ""]
    metadata["tokenizer.ggml.token_type"] += [1, 3]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.id_to_token(tokenizer.vocab_size - 1) == f"[EMPTY_{tokenizer.vocab_size - 1}]"


def test_named_chat_templates() -> None:
    metadata = small_bpe("qwen2") | {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t",
                                     "tokenizer.chat_templates": ["tool_use"]}
    assert Tokenizer.from_gguf(metadata).chat_template.templates == {"default": "d", "tool_use": "t"}


def test_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    """Both readings of special tokens at once: neither disturbs the other."""
    expected = {special: [tokenizer.encode(t, True, special) for t in corpus()] for special in (True, False)}
    wrong: list[str] = []

    def work(special: bool) -> None:
        for text, ids in zip(corpus(), expected[special], strict=True):
            if tokenizer.encode(text, True, special) != ids:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_nothing_heavy_is_imported() -> None:
    code = ("import sys, metrale.text.tokenizer, metrale.text.gguf_vocab, metrale.text.directory, metrale.text.chat, "
            "metrale.text.detokenizer, metrale.text.stops; print(sorted({'tokenizers', 'jinja2', 'numpy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
