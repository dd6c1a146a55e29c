"""What a tokenizer's source (a GGUF file, a folder) says about its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metrale.text.pieces import Spelling

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class Vocab:
    """A vocabulary ready for use by `Tokenizer`.

    `prefix_ids` and `suffix_ids` are what ``add_special`` puts around a text. `literal_ids` are tokens whose bytes are
    their own text; `silent_ids` (padding rows of the embedding) add no bytes. `strip_space`: the first space of a decoded
    text belongs to the tokenizer (SentencePiece's dummy prefix) and is dropped.
    """

    backend: Backend
    size: int
    spelling: Spelling
    strip_space: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    literal_ids: frozenset[int] = frozenset()
    silent_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    templates: Mapping[str, str] = field(default_factory=dict)  # "default" -> jinja source
