"""Read the tokenizer of a checkpoint folder: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metrale.errors import ConfigError, UnsupportedError
from metrale.text.pieces import Spelling
from metrale.text.vocab import Vocab

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_vocab(path: str | os.PathLike[str]) -> Vocab:
    """Return the vocabulary of a folder.

    Files: tokenizer.json; optional tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
    additional_chat_templates/*.jinja, config.json and generation_config.json (for their ``eos_token_id`` only).
    Raises: ConfigError (``tokenizer.missing``, ``tokenizer.json``), UnsupportedError (``tokenizer.decoder``).
    """
    folder = Path(path)
    backend = _backend(folder / "tokenizer.json")
    settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    added = backend.get_added_tokens_decoder()
    named = {name: text for name in _NAMES if (text := _token_text(settings.get(name))) is not None}
    spelling, strip_space = _decoding(backend)
    special = {i for i, token in added.items() if token.special}
    special |= {i for text in named.values() if (i := backend.token_to_id(text)) is not None}
    bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    prefix, suffix = _around(backend)
    size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
    return Vocab(
        backend=backend, size=size, spelling=spelling, strip_space=strip_space, bos_id=bos,
        eos_ids=_eos_ids(folder, eos, size), special_ids=frozenset(special),
        # An added token is written as it reads; in SentencePiece vocabularies U+2581 means a space there too.
        literal_ids=frozenset(added if spelling == "bytes" else special), prefix_ids=prefix, suffix_ids=suffix,
        named_tokens=named, templates=_templates(folder, settings),
    )


def _backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise ConfigError(f"{path}: expected the tokenizer, got no such file; fetch tokenizer.json with the checkpoint",
                          code="tokenizer.missing")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for every kind of bad file
        raise ConfigError(f"{path}: expected a tokenizer that `tokenizers` can read, got: {error}; fetch the file again or "
                          "update the package", code="tokenizer.json") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _json(path: Path) -> dict[str, Any]:
    """Return an optional JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise ConfigError(f"{path}: expected JSON, got: {error}; fetch the file again", code="tokenizer.json") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}; fetch the file again",
                          code="tokenizer.json")
    return value


def _token_text(value: object) -> str | None:
    """Return the text of a token given as a string or as a serialized AddedToken."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _decoding(backend: Backend) -> tuple[Spelling, bool]:
    """Return how pieces are spelled and whether a leading space belongs to the tokenizer."""
    if backend.decoder is None:
        raise UnsupportedError("tokenizer.json: expected a decoder, got none; use a checkpoint whose tokenizer says how "
                               "tokens become text", code="tokenizer.decoder")
    spec = json.loads(backend.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    types = [step["type"] for step in steps]
    if "ByteLevel" in types and set(types) <= {"ByteLevel", "Fuse"}:
        return "bytes", False
    if not set(types) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise UnsupportedError(f"tokenizer.json: expected a byte-level or SentencePiece decoder, got {', '.join(types)}; "
                               "this kind of tokenizer is not implemented", code="tokenizer.decoder")
    strip = False
    for step in steps:
        if step["type"] == "Strip":
            strip |= step.get("content") == " " and step.get("start", 0) > 0
        elif step["type"] == "Metaspace":
            strip |= step.get("prepend_scheme", "always") != "never"
    return "spm", strip


def _around(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor puts before and after a text.

    It decides alone: transformers 5 drops ``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json where there is
    a tokenizer.json.
    """
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start:start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare):])
    raise UnsupportedError("tokenizer.json: expected a post-processor that puts tokens around a text, got one that changes "
                           "the text's own ids; this kind of tokenizer is not implemented", code="tokenizer.decoder")


def _eos_ids(folder: Path, eos: int | None, size: int) -> tuple[int, ...]:
    """Return the union over the files: any one of them may be incomplete."""
    found = [] if eos is None else [eos]
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        candidates: Iterable[Any] = value if isinstance(value, list) else [value]
        found += [i for i in candidates if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size]
    return tuple(dict.fromkeys(found))


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; files of their own win over tokenizer_config.json."""
    found: dict[str, str] = {}
    listed = settings.get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        for item in listed:
            if isinstance(item, Mapping) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
                found[item["name"]] = item["template"]
    old = _json(folder / "chat_template.json").get("chat_template")
    if isinstance(old, str):
        found["default"] = old
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    single = folder / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text(encoding="utf-8")
    return found
