"""Typed access to the ``tokenizer.ggml.*`` keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metrale.errors import ConfigError

_PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class Keys:
    """The metadata of one file; every reader raises ConfigError (``tokenizer.gguf``) on a value of the wrong kind."""

    metadata: Mapping[str, Any]

    def error(self, key: str, expected: str, got: str) -> ConfigError:
        """Return the error for a key; the caller raises it."""
        return ConfigError(f"{_PREFIX}{key}: expected {expected}, got {got}; convert the checkpoint again",
                           code="tokenizer.gguf")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self.metadata.get(_PREFIX + key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string", "no such key" if value is None else type(value).__name__)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.metadata.get(_PREFIX + key, default)
        if value not in (True, False):
            raise self.error(key, "true or false", repr(value))
        return bool(value)

    def token_id(self, key: str, count: int, default: int | None) -> int | None:
        """Return a token id below `count`, or None when the key and the default are absent."""
        value = self.metadata.get(_PREFIX + key)
        if value is None:
            return default if default is not None and default < count else None
        if isinstance(value, (bool, float, str)) or not hasattr(value, "__index__"):
            raise self.error(key, "a token id", repr(value))
        token = int(value)
        if token in (-1, 0xFFFFFFFF):  # how writers say "none"
            return None
        if not 0 <= token < count:
            raise self.error(key, f"a token id below {count}", str(token))
        return token

    def texts(self, key: str) -> list[str]:
        """Return an array of strings."""
        value = self._array(key)
        if value is None:
            raise self.error(key, "an array of strings", "no such key")
        items = list(value)
        if set(map(type, items)) - {str}:
            raise self.error(key, "an array of strings", "other values")
        return items

    def spaced(self, key: str) -> tuple[str, int]:
        """Return an array of strings joined by spaces, and their number.

        The reader's arrays are joined as bytes and decoded once: for 48,900 merges that saves 20 ms.
        """
        value = self._array(key)
        raw_strings = getattr(value, "raw_strings", None)
        if raw_strings is None or getattr(value, "element", "") != "string":
            items = self.texts(key)
            return " ".join(items), len(items)
        raw: list[bytes] = raw_strings()
        try:
            return b" ".join(raw).decode("utf-8"), len(raw)
        except UnicodeDecodeError as error:
            raise self.error(key, "UTF-8 text", str(error)) from error

    def numbers(self, key: str, count: int) -> list[float] | None:
        """Return an array of at least `count` numbers cut to `count`, or None when the key is absent."""
        value = self._array(key)
        if value is None:
            return None
        listed = list(value)
        if set(map(type, listed)) - {int, float}:
            raise self.error(key, "an array of numbers", "other values")
        if len(listed) < count:
            raise self.error(key, f"{count} numbers, one a token", str(len(listed)))
        return listed[:count]

    def _array(self, key: str) -> Sequence[Any] | None:
        value = self.metadata.get(_PREFIX + key)
        if value is None:
            return None
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
            raise self.error(key, "an array", type(value).__name__)
        return value  # type: ignore[no-any-return]
