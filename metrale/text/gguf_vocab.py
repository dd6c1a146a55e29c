"""Rebuild the vocabulary that a GGUF file carries in its metadata as a `tokenizers` object.

Two models exist: ``gpt2`` (byte-level BPE with a named pre-tokenizer) and ``llama`` (SentencePiece BPE with scores and
byte fallback). The objects are built from Python dicts and lists: a detour over JSON text took 170 ms for SmolLM2's
49,152 tokens and 48,900 merges where this takes 110 (two busy cores).

Source: the GGUF specification's tokenizer keys; llama.cpp src/llama-vocab.cpp for defaults and token types.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from metrale.errors import UnsupportedError
from metrale.text import pretokenizers, spm
from metrale.text.gguf_keys import Keys
from metrale.text.pieces import SPACE
from metrale.text.vocab import Vocab

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Tokens that end an answer whatever the file calls end-of-sequence, and are control tokens whatever type it gives them.
END_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
})


class _Special(NamedTuple):
    """What the special tokens of a file add up to."""

    bos: int | None
    eos: tuple[int, ...]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    named: dict[str, str]


def build_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """Return the vocabulary described by the ``tokenizer.*`` keys of a GGUF file.

    Raises: ConfigError (``tokenizer.gguf``) for missing, malformed or contradictory keys; UnsupportedError
    (``tokenizer.model``, ``tokenizer.pre``) for a model or pre-tokenizer that is not implemented, by name.
    """
    keys = Keys(metadata)
    model = keys.text("model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(f"tokenizer.ggml.model: expected 'gpt2' or 'llama', got {model!r}; use the checkpoint's "
                               "safetensors and tokenizer.json instead", code="tokenizer.model")
    build = _byte_level if model == "gpt2" else _sentencepiece
    try:
        with _no_collection():
            tokens = _tokens(keys)
            ids = _ids(keys, tokens)
            return build(keys, tokens, ids, _kinds(keys, ids))
    except UnicodeEncodeError as error:
        raise keys.error("tokens", "UTF-8 text", str(error)) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: a hundred thousand young tuples set it off again and again.

    Measured with SmolLM2 on a busy machine: 0.24 s with it, 0.15 s without.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tokens(keys: Keys) -> list[str]:
    tokens = keys.texts("tokens")
    "".join(tokens).encode("utf-8")  # raises for lone surrogates
    if not tokens:
        raise keys.error("tokens", "at least one token", "none")
    if "" in tokens:  # the name llama.cpp gives them, so that two of them differ
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    return tokens


def _kinds(keys: Keys, ids: Mapping[str, int]) -> dict[int, int]:
    """Return the type of each token that is not an ordinary one, in the order of ids."""
    types = keys.numbers("token_type", len(ids)) or []
    # Selected in C: nearly all of up to 262,144 tokens are ordinary.
    kinds = {i: int(types[i]) for i in compress(range(len(types)), map(NORMAL.__ne__, types))}
    ends = {ids[text]: CONTROL for text in END_TEXTS if text in ids}
    return dict(sorted((kinds | ends).items()))


def _ids(keys: Keys, tokens: list[str]) -> dict[str, int]:
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        seen: set[str] = set()
        double = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise keys.error("tokens", "distinct tokens", f"{double!r} twice")
    return ids


def _byte_level(keys: Keys, tokens: list[str], ids: dict[str, int], kinds: dict[int, int]) -> Vocab:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    spec = pretokenizers.find(keys.text("pre", ""))
    merges = _merges(keys)
    try:
        model = models.BPE(ids, merges, ignore_merges=spec.whole_words)
    except Exception as error:  # `tokenizers` raises bare Exception for a merge of unknown tokens
        raise keys.error("merges", "pairs of tokens whose joined text is a token", str(error)) from error
    backend = Backend(model)
    backend.pre_tokenizer = pretokenizers.build(spec)
    special = _special_tokens(keys, tokens, ids, add_bos=spec.add_bos)
    _add_tokens(backend, tokens, kinds)
    return Vocab(
        backend=backend, size=len(tokens), spelling="bytes", bos_id=special.bos, eos_ids=special.eos,
        special_ids=_of_kinds(kinds, CONTROL, UNKNOWN), literal_ids=_of_kinds(kinds, CONTROL, UNKNOWN, USER_DEFINED),
        silent_ids=_of_kinds(kinds, UNUSED), prefix_ids=special.prefix, suffix_ids=special.suffix,
        named_tokens=special.named, templates=_templates(keys),
    )


def _merges(keys: Keys) -> list[tuple[str, str]]:
    """Return the pairs of ``merges``; byte-level tokens contain no space, so one split serves all lines at once."""
    text, lines = keys.spaced("merges")
    words = text.split(" ") if lines else []
    if len(words) != 2 * lines:
        raise keys.error("merges", "two tokens and a space a line", f"{len(words)} words in {lines} lines")
    return list(zip(words[::2], words[1::2], strict=True))


def _sentencepiece(keys: Keys, tokens: list[str], ids: dict[str, int], kinds: dict[int, int]) -> Vocab:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers

    scores = keys.numbers("scores", len(tokens))
    if scores is None:
        raise keys.error("scores", "a score a token", "no such key")
    unmergeable = _of_kinds(kinds, CONTROL, UNKNOWN, BYTE)
    merges = spm.merges_from_scores(tokens, scores, ids, [i for i in range(len(tokens)) if i not in unmergeable])
    unknown = keys.token_id("unknown_token_id", len(tokens), 0)
    has_bytes = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    backend = Backend(models.BPE(ids, merges, byte_fallback=has_bytes, fuse_unk=True,
                                 unk_token=None if unknown is None else tokens[unknown]))
    space_prefix = keys.flag("add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    special = _special_tokens(keys, tokens, ids, add_bos=True)
    # llama.cpp lets Phi-3's special tokens swallow the blanks after them, as that family's tokenizer.json does.
    name = str(keys.metadata.get("general.name", "")).lower()
    _add_tokens(backend, tokens, kinds, strip_right="phi-3" in name or "phi3" in name)
    return Vocab(
        backend=backend, size=len(tokens), spelling="spm", strip_space=space_prefix, bos_id=special.bos,
        eos_ids=special.eos, special_ids=_of_kinds(kinds, CONTROL, UNKNOWN),
        literal_ids=_of_kinds(kinds, CONTROL, UNKNOWN), prefix_ids=special.prefix, suffix_ids=special.suffix,
        named_tokens=special.named, templates=_templates(keys),
    )


def _of_kinds(kinds: Mapping[int, int], *wanted: int) -> frozenset[int]:
    return frozenset(i for i, kind in kinds.items() if kind in wanted)


def _add_tokens(backend: Backend, tokens: Sequence[str], kinds: Mapping[int, int], *, strip_right: bool = False) -> None:
    """Tell the backend which tokens are found in the raw text before anything else happens to it."""
    from tokenizers import AddedToken

    keep = {"<unk>", "<s>", "<|endoftext|>"}
    # One call for special and other tokens: each call rebuilds the search automaton.
    backend.add_tokens([
        AddedToken(tokens[i], special=kind != USER_DEFINED, normalized=False, rstrip=strip_right and tokens[i] not in keep)
        for i, kind in kinds.items()
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ])


def _special_tokens(keys: Keys, tokens: Sequence[str], ids: Mapping[str, int], *, add_bos: bool) -> _Special:
    """Read the special ids: the file's own, the known end-of-answer texts, what is put around a text."""
    count = len(tokens)
    sentencepiece = keys.text("model") == "llama"
    bos = keys.token_id("bos_token_id", count, 1 if sentencepiece else None)
    eos = keys.token_id("eos_token_id", count, 2 if sentencepiece else None)
    ends = {keys.token_id("eot_token_id", count, None), keys.token_id("eom_token_id", count, None)}
    ends |= {ids[text] for text in END_TEXTS if text in ids}
    if {"<|return|>", "<|call|>"} <= ids.keys():  # harmony: <|end|> ends a message, not the answer
        ends.discard(ids.get("<|end|>"))
    named_ids = {"bos_token": bos, "eos_token": eos, "unk_token": keys.token_id("unknown_token_id", count, None),
                 "pad_token": keys.token_id("padding_token_id", count, None)}
    return _Special(
        bos=bos,
        eos=(*(() if eos is None else (eos,)), *sorted(i for i in ends if i is not None and i != eos)),
        prefix=_around(keys, "add_bos_token", bos, add_bos),
        suffix=_around(keys, "add_eos_token", eos, False),
        named={name: tokens[i] for name, i in named_ids.items() if i is not None},
    )


def _around(keys: Keys, key: str, token: int | None, default: bool) -> tuple[int, ...]:
    if not keys.flag(key, default):
        return ()
    if token is None:
        raise keys.error(key, "a file that names the token to add", "no id for it")
    return (token,)


def _templates(keys: Keys) -> dict[str, str]:
    """Collect ``tokenizer.chat_template`` and the named ``tokenizer.chat_template.NAME``."""
    base = "tokenizer.chat_template"
    found = {}
    for key, value in keys.metadata.items():
        if isinstance(value, str) and (key == base or key.startswith(base + ".")):
            found[key[len(base) + 1:] or "default"] = value
    return found
