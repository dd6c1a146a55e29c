"""Incremental detokenizer: text as tokens arrive, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The control tokens."""
        ...

    @property
    def strip_space(self) -> bool:
        """Whether the first space of a decoded text is the tokenizer's own."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        ...


class Detokenizer:
    """One text in the making; not for two threads at once.

    The pieces that `push` and `flush` return, joined, equal ``tokenizer.decode(ids, skip_special)``. `push` costs time in
    proportion to the token's own bytes: an incomplete character of at most three bytes is all that is carried along.
    """

    __slots__ = ("_decoder", "_size", "_skipped", "_strip", "_tokenizer")

    def __init__(self, tokenizer: TokenBytes, skip_special: bool = True, *, continues: bool = False) -> None:
        """Start a text.

        skip_special: control tokens add nothing. continues: the text goes on from an earlier one, so that a SentencePiece
        vocabulary's leading space is a space between words and is kept.
        """
        self._tokenizer = tokenizer
        self._size = tokenizer.vocab_size
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._strip = tokenizer.strip_space and not continues
        self._decoder = _UTF8(errors="replace")

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is now certain, often "" within a character.

        An id above the vocabulary (models pad their embedding to a round number of rows) adds nothing.
        Raises: RequestError (``token.range``) for a negative id.
        """
        if token_id in self._skipped or token_id >= self._size:
            return ""
        added = self._tokenizer.token_bytes(token_id)
        if self._strip and added:
            self._strip = False
            if added.startswith(b" "):
                added = added[1:]
        return self._decoder.decode(added)

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Take several tokens and return their text."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """End the text: an incomplete character becomes U+FFFD. Harmless twice."""
        return self._decoder.decode(b"", True)
