"""Vocabularies for the tests: a small byte-level one, small SentencePiece ones, and llama.cpp as the judge."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metrale.text.pieces import byte_characters
from tests.text.corpus import HERE, corpus

# One name a set of expressions. The last two are compared on ASCII only: llama.cpp approximates their letter classes.
PRE_NAMES = ("default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "falcon", "deepseek-v3", "tekken", "gpt-4o")
ASCII_ONLY = frozenset({"tekken", "gpt-4o"})
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "<unk>")
USER = ("<empty_output>", "::")


def small_bpe(pre: str) -> dict[str, Any]:
    """Return GGUF metadata over the committed merges, which cross words so that every wrong split shows."""
    merges = json.loads((HERE / "small_bpe.json").read_text(encoding="utf-8"))
    tokens = [*SPECIAL, *byte_characters().values(), *(merge.replace(" ", "") for merge in merges), *USER, "[PAD0]"]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - len(USER) - 1) + [4] * len(USER) + [5]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 4,
    }


def train_merges(count: int) -> list[str]:
    """Train the merges of `small_bpe` over the corpus without splitting it into words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count, initial_alphabet=sorted(byte_characters().values()), show_progress=False, max_token_length=12
    )
    backend.train_from_iterator([text for text in corpus() * 2 if "<|" not in text], trainer)
    return [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def train_sentencepiece(byte_fallback: bool, space_prefix: bool = True) -> Any:
    """Train a SentencePiece BPE model over the corpus, as Llama's was: no normalisation, no space is removed."""
    import sentencepiece

    # SentencePiece reads a training line as ending at NUL and at a newline.
    lines = [text.replace("\x00", "") for text in corpus() if "\n" not in text]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=1600,
        character_coverage=0.98 if byte_fallback else 1.0, byte_fallback=byte_fallback, add_dummy_prefix=space_prefix,
        remove_extra_whitespaces=False, normalization_rule_name="identity",
        max_sentencepiece_length=8, hard_vocab_limit=False, num_threads=1, minloglevel=2, allow_whitespace_only_pieces=True,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: Any, space_prefix: bool = True) -> dict[str, Any]:
    """Return a SentencePiece model as the GGUF converters write it."""
    count = processor.get_piece_size()

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        if processor.is_control(i):
            return 3
        if processor.is_byte(i):
            return 6
        return 5 if processor.is_unused(i) else 1

    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(count)],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write a GGUF file that holds a vocabulary and nothing else."""
    import gguf

    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class LlamaCpp:
    """llama.cpp's tokenizer of one GGUF file."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._llama = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
        self._vocab = llama_cpp.llama_model_get_vocab(self._llama._model.model)

    def encode(self, text: str, special: bool) -> list[int]:
        return self._llama.tokenize(text.encode("utf-8"), add_bos=False, special=special)

    def piece(self, token_id: int) -> bytes:
        import ctypes

        buffer = ctypes.create_string_buffer(4096)
        length = self._lib.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, True)
        assert length >= 0
        return buffer.raw[:length]

    def close(self) -> None:
        self._llama.close()


@contextmanager
def llama_cpp_of(path: Path) -> Iterator[LlamaCpp]:
    """Open llama.cpp's tokenizer for a while."""
    judge = LlamaCpp(path)
    try:
        yield judge
    finally:
        judge.close()


def comparable(pre: str, text: str) -> bool:
    """Say whether llama.cpp means the same split as the family's own tokenizer for this text."""
    return pre not in ASCII_ONLY or text.isascii()
