"""The tokenizer: text to ids and back, whatever file it came from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from metrale.errors import RequestError
from metrale.text.pieces import piece_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from metrale.text.chat import ChatTemplate
    from metrale.text.vocab import Vocab


class Tokenizer:
    """Ids for text and text for ids; immutable, safe to share between threads.

    bos_id: the beginning-of-sequence id or None. eos_ids: every id that ends an answer, the file's own first.
    special_ids: control tokens, which `skip_special` leaves out.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self.vocab_size = vocab.size
        self.bos_id = vocab.bos_id
        self.eos_ids = vocab.eos_ids
        self.special_ids = vocab.special_ids
        self.named_tokens = dict(vocab.named_tokens)
        self.strip_space = vocab.strip_space
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Open the tokenizer of a checkpoint folder: tokenizer.json and the files beside it.

        Raises: ConfigError (``tokenizer.missing``, ``tokenizer.json``), UnsupportedError (``tokenizer.decoder``).
        """
        from metrale.text.directory import read_vocab

        return cls(read_vocab(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer from a GGUF file's key/values.

        Raises: ConfigError (``tokenizer.gguf``), UnsupportedError (``tokenizer.model``, ``tokenizer.pre``).
        """
        from metrale.text.gguf_vocab import build_vocab

        return cls(build_vocab(metadata))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of a text.

        add_special: put the model's begin (and end) tokens around it, where its files say so.
        parse_special: special tokens written in the text become their ids; False spells them out as plain text, which
        is what text from strangers needs.
        Raises: RequestError (``prompt.text``) for anything but a str of Unicode scalar values.
        """
        checked_text(text)
        backend = self._vocab.backend if parse_special else self._plain
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return self._surrounded(ids) if add_special else ids

    def encode_batch(
        self, texts: Sequence[str], add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Return the ids of several texts, as `encode` does one by one; `tokenizers` spreads them over its threads."""
        if isinstance(texts, str):
            raise RequestError("prompts: expected a list of strings, got one string; use encode", code="prompt.text")
        for text in texts:
            checked_text(text)
        backend = self._vocab.backend if parse_special else self._plain
        batch = [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [self._surrounded(ids) for ids in batch] if add_special else batch

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the ids of a conversation: the rendered chat template, which writes its own special tokens.

        options: as for `ChatTemplate.render`; by default the ids end with the opening of the assistant's answer.
        Raises: RequestError (``chat.messages``, ``chat.template``).
        """
        return self.encode(self.chat_template.render(messages, **options), add_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Return the text of some ids; bytes that are not UTF-8 become U+FFFD.

        skip_special: leave control tokens out.
        Raises: RequestError (``token.range``) for an id outside the vocabulary.
        """
        skipped = self.special_ids if skip_special else frozenset[int]()
        text = b"".join([self.token_bytes(i) for i in ids if i not in skipped])
        if self.strip_space and text.startswith(b" "):
            text = text[1:]
        return text.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes a token adds to a text; a part of a character, or nothing, is possible.

        Raises: RequestError (``token.range``).
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spelled(token_id)
        return known

    def id_to_token(self, token_id: int) -> str:
        """Return a token as its vocabulary spells it ("Ġthe", "▁the", "<0x0A>").

        Raises: RequestError (``token.range``).
        """
        self._check_id(token_id)
        return self._vocab.backend.id_to_token(int(token_id)) or ""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token spelled as in the vocabulary, or None."""
        return self._vocab.backend.token_to_id(checked_text(token))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template; one without sources raises when it is rendered."""
        from metrale.text.chat import ChatTemplate

        return ChatTemplate(self._vocab.templates, self.named_tokens)

    @cached_property
    def _plain(self) -> Backend:
        """A second backend over the same model that reads special tokens as plain text.

        The switch is a property of the whole object, and one object serves all threads: two objects, no flipping.
        """
        from tokenizers import Tokenizer as Backend

        ours = self._vocab.backend
        plain = Backend(ours.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(ours, part) is not None:
                setattr(plain, part, getattr(ours, part))
        plain.add_tokens([token for _, token in sorted(ours.get_added_tokens_decoder().items())])
        plain.encode_special_tokens = True
        return plain

    def _surrounded(self, ids: list[int]) -> list[int]:
        return [*self._vocab.prefix_ids, *ids, *self._vocab.suffix_ids]

    def _check_id(self, token_id: int) -> None:
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise RequestError(f"token id: expected an integer, got {token_id!r}; pass ids as int", code="token.range")
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id: expected 0 to {self.vocab_size - 1}, got {token_id}; this tokenizer has no such "
                               "token", code="token.range")

    def _spelled(self, token_id: int) -> bytes:
        self._check_id(token_id)
        vocab = self._vocab
        if token_id in vocab.silent_ids:
            return b""
        piece = vocab.backend.id_to_token(int(token_id)) or ""
        if token_id in vocab.literal_ids:
            return piece.encode("utf-8")
        return piece_bytes(piece, vocab.spelling)


def checked_text(text: object) -> str:
    """Return the text when it can be encoded as UTF-8.

    Raises: RequestError (``prompt.text``) for another type or for lone surrogates, which no tokenizer has ids for.
    """
    if not isinstance(text, str):
        raise RequestError(f"prompt: expected a string, got {type(text).__name__}; pass token ids as a list of int instead",
                           code="prompt.text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt: expected Unicode text, got a lone surrogate U+{ord(text[error.start]):04X} at character "
                           f"{error.start}; decode the input with errors='replace'", code="prompt.text") from error
    return text
