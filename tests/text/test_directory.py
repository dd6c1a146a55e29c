"""Tokenizers read from checkpoint folders behave as transformers makes them behave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from metrale.errors import ConfigError, UnsupportedError
from metrale.text import tokenizer as ours
from metrale.text.pieces import byte_characters
from tests.oracles import oracle_module
from tests.text.corpus import HERE, corpus
from tests.text.vocabularies import sentencepiece_metadata, train_sentencepiece

CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "unk_token": None,
          "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}


def byte_level() -> Tokenizer:
    merges = [tuple(line.split(" ")) for line in json.loads((HERE / "small_bpe.json").read_text(encoding="utf-8"))]
    tokens = ["<pad>", *byte_characters().values(), *map("".join, merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("ﬁx", normalized=False)])
    s, e = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", s), ("</s>", e)])
    return backend


def sentencepiece(space: str) -> Tokenizer:
    """Build a Llama-style tokenizer.json: space is "prepend" (older files), "metaspace" (newer) or "none" (Gemma)."""
    metadata = sentencepiece_metadata(train_sentencepiece(True))
    rebuilt = ours.Tokenizer.from_gguf(metadata)._vocab.backend
    backend = Tokenizer(rebuilt.model)
    replace = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif space == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence([*steps, *([] if space == "none" else [decoders.Strip(" ", 1, 0)])])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write(folder: Path, backend: Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config), encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


KINDS = {"bytes": byte_level, **{f"spm-{s}": (lambda s=s: sentencepiece(s)) for s in ("prepend", "metaspace", "none")}}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_equals_transformers(kind: str, adds: dict[str, bool], tmp_path: Path) -> None:
    transformers = oracle_module("transformers", why="the oracle is not installed")
    folder = write(tmp_path, KINDS[kind](), CONFIG | adds)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    mine = ours.Tokenizer.from_directory(folder)
    assert mine.bos_id == theirs.bos_token_id
    assert mine.eos_ids == (theirs.eos_token_id,)
    assert mine.vocab_size == len(theirs)
    for text in [*corpus(), "a<s>b </s> c<tool>d ﬁx"]:
        ids = mine.encode(text)
        assert ids == theirs.encode(text), text
        bare = mine.encode(text, add_special=False)
        assert bare == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert mine.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert mine.encode(text, add_special=False, parse_special=False) == plain, text


def test_post_processor_decides_without_a_setting(tmp_path: Path) -> None:
    mine = ours.Tokenizer.from_directory(write(tmp_path, byte_level()))
    bos, eos = mine.token_to_id("<s>"), mine.token_to_id("</s>")
    assert mine.encode("") == [bos, eos]
    assert mine.encode("", add_special=False) == []
    assert mine.special_ids == {bos, eos, mine.token_to_id("<|end|>")}
    assert mine.token_bytes(mine.token_to_id("ﬁx") or 0) == "ﬁx".encode()
    assert mine.token_bytes(mine.token_to_id("<pad>") or 0) == b"<pad>"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    mine = ours.Tokenizer.from_directory(write(tmp_path, backend))
    text = "a longer text than four tokens, 1234567"
    assert mine.decode(mine.encode(text, add_special=False)) == text


def test_eos_ids_are_the_union(tmp_path: Path) -> None:
    backend = byte_level()
    end, eos = backend.token_to_id("<|end|>"), backend.token_to_id("</s>")
    write(tmp_path, backend, generation_config={"eos_token_id": [end, 10**9]})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8")
    assert ours.Tokenizer.from_directory(tmp_path).eos_ids == (eos, end, 7)


def test_chat_templates_of_a_folder(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "x"}]
    write(tmp_path, byte_level())
    assert ours.Tokenizer.from_directory(tmp_path).chat_template.render(user) == "<s>x"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write(tmp_path, byte_level(), CONFIG | {"chat_template": named})
    assert ours.Tokenizer.from_directory(tmp_path).chat_template.templates == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r", encoding="utf-8")
    template = ours.Tokenizer.from_directory(tmp_path).chat_template
    assert template.render(user) == "file </s>"
    assert template.render(user, name="rag") == "r"


def test_named_tokens_from_special_tokens_map(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), {}, special_tokens_map={"bos_token": {"content": "<s>"}, "eos_token": "<|end|>"})
    mine = ours.Tokenizer.from_directory(tmp_path)
    assert mine.named_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert mine.eos_ids == (mine.token_to_id("<|end|>"),)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: expected the tokenizer, got no such file") as caught:
        ours.Tokenizer.from_directory(tmp_path)
    assert caught.value.code == "tokenizer.missing"
    for text in ("", "{", "[]", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}', "\x00"):
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="expected a tokenizer that") as caught:
            ours.Tokenizer.from_directory(tmp_path)
        assert caught.value.code == "tokenizer.json"
    write(tmp_path, byte_level())
    for data in (b"{", b"[1]", b"\xff\xfe"):
        (tmp_path / "tokenizer_config.json").write_bytes(data)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: expected") as caught:
            ours.Tokenizer.from_directory(tmp_path)
        assert caught.value.code == "tokenizer.json"


def test_kinds_without_a_decoder_are_refused(tmp_path: Path) -> None:
    backend = byte_level()
    for decoder, said in ((decoders.WordPiece(), "got WordPiece"), (decoders.CTC(), "got CTC")):
        backend.decoder = decoder
        with pytest.raises(UnsupportedError, match=said) as caught:
            ours.Tokenizer.from_directory(write(tmp_path, backend))
        assert caught.value.code == "tokenizer.decoder"
