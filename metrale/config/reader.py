"""`ConfigReader`: typed, strict access to a JSON object, with a record of what was read.

A family reads every key it understands; `expect` refuses values it does not implement; `unread` names the rest. So a
config key can change what a model computes only if somebody here knows it.
"""

from __future__ import annotations

import builtins
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from metrale.errors import ConfigError, UnsupportedError

T = TypeVar("T")

# The reader's methods are named like the types they return, so its annotations need other names for those types.
Name: TypeAlias = str
Count: TypeAlias = int
Truth: TypeAlias = bool

MAX_INT: Final = 2**31 - 1  # sizes, token ids and positions are int32 everywhere below
MAX_LAYERS: Final = 4096  # a damaged number must not cost memory before it is compared with the weights
REQUIRED: Final[Any] = object()

# Keys that do not change what a model computes at inference: training, bookkeeping, hints to other programs, and token
# ids that `metrale.config.files` reads from the raw mapping.
INERT_KEYS: Final = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures",
    "attention_dropout", "auto_map", "boi_token_id", "boi_token_index", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eoi_token_id", "eoi_token_index", "eos_token_id", "finetuning_task",
    "hidden_dropout", "id2label", "image_token_id", "image_token_index", "initializer_range", "is_llama_config",
    "keys_to_ignore_at_inference", "label2id", "mm_tokens_per_image", "model_type", "num_logits_to_keep",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop",
    "return_dict", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_cache", "vision_config",
})  # fmt: skip


class ConfigReader:
    """A view of a JSON object.

    A key may be dotted (``rope_parameters.rope_theta``) to reach into nested objects; several keys are alternatives, of
    which the first that is present and not null wins. Every key asked for counts as read, present or not.
    """

    def __init__(self, mapping: Mapping[Name, Any], source: Name, *, path: Name = "") -> None:
        self._mapping = mapping
        self._path = path
        self._read: set[Name] = set()
        self._children: dict[Name, ConfigReader] = {}
        self.source = source

    def __contains__(self, key: Name) -> Truth:
        return self._find(key) is not None

    def name(self, key: Name) -> Name:
        """Return where a key stands, for error sentences: ``config.json: text_config.hidden_size``."""
        return f"{self.source}: {self._path}{key}"

    # -- typed access --

    def get(self, *keys: Name, default: Any = REQUIRED) -> Any:
        """Return the first present, non-null value.

        Raises: ConfigError ``config.missing`` when there is none and no default.
        """
        found = self._lookup(keys)
        if found is not None:
            return found[1]
        if default is REQUIRED:
            near = difflib.get_close_matches(keys[0], list(self._mapping), n=1)
            remedy = f"did you mean {near[0]}?" if near else "this is not a complete model config"
            raise ConfigError(f"{self.name(keys[0])}: expected a value, got none; {remedy}", code="config.missing")
        return default

    def int(self, *keys: Name, default: Any = REQUIRED, least: Count | None = None, most: Count = MAX_INT) -> Any:
        """Return an integer (a float without a fraction counts); `default` may be None.

        Raises: ConfigError ``config.missing``, ``config.type``, or ``config.value`` outside [least, most].
        """
        value = self._typed(keys, default, as_int, "an integer")
        if least is not None and value is not None and value < least:
            raise ConfigError(
                f"{self.name(keys[0])}: expected at least {least}, got {value}; correct the config", code="config.value"
            )
        if value is not None and value > most:
            raise ConfigError(
                f"{self.name(keys[0])}: expected at most {most}, got {_shown(value)}; correct the config", code="config.value"
            )
        return value

    def float(self, *keys: Name, default: Any = REQUIRED) -> Any:
        """Return a float; ``{"__float__": "Infinity"}`` and its kin are read as such.

        Raises: ConfigError ``config.missing``, ``config.type``.
        """
        return self._typed(keys, default, as_float, "a number")

    def positive(self, *keys: Name, default: Any = REQUIRED) -> Any:
        """Return a float that is finite and above zero.

        Raises: ConfigError ``config.missing``, ``config.type``, ``config.value``.
        """
        value = self.float(*keys, default=default)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{self.name(keys[0])}: expected a finite number above 0, got {value}; correct the config", code="config.value"
            )
        return value

    def bool(self, *keys: Name, default: Any = REQUIRED) -> Any:
        """Return a bool. Raises: ConfigError ``config.missing``, ``config.type``."""
        return self._typed(keys, default, as_bool, "true or false")

    def str(self, *keys: Name, default: Any = REQUIRED) -> Any:
        """Return a string. Raises: ConfigError ``config.missing``, ``config.type``."""
        return self._typed(keys, default, as_str, "a string")

    def list(self, *keys: Name, of: type, default: Any = REQUIRED, length: Count | None = None) -> Any:
        """Return a tuple of `of` (int, float, bool or str).

        Raises: ConfigError ``config.missing``, ``config.type``, or ``config.value`` when its length is not `length`.
        """
        read = {builtins.int: as_int, builtins.float: as_float, builtins.bool: as_bool, builtins.str: as_str}[of]

        def items(value: Any) -> tuple[Any, ...]:
            if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
                raise TypeError
            return tuple(read(item) for item in value)

        value = self._typed(keys, default, items, f"a list of {of.__name__}")
        if length is not None and value is not None and len(value) != length:
            raise ConfigError(
                f"{self.name(keys[0])}: expected {length} entries, got {len(value)}; correct the config", code="config.value"
            )
        return value

    def child(self, key: Name) -> ConfigReader | None:
        """Return a reader of a nested object, or None when it is absent or null; its unread keys join this reader's.

        Raises: ConfigError ``config.type`` when the value is not an object.
        """
        if key in self._children:
            return self._children[key]
        value = self._typed((key,), None, as_mapping, "an object")
        if value is None:
            return None
        reader = ConfigReader(value, self.source, path=f"{self._path}{key}.")
        self._children[key] = reader
        return reader

    def expect(self, key: Name, *allowed: Any, why: Name = "") -> None:
        """Refuse a value this build does not implement; an absent key passes, null passes when None is allowed.

        Raises: UnsupportedError ``config.unsupported`` naming the key, the allowed values and the value.
        """
        found = self._find(key)
        self._mark(key)
        if found is None:
            return
        value = found[0]
        if any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            return
        shown = " or ".join(_shown(a) for a in allowed)
        remedy = why or "this build does not implement it"
        raise UnsupportedError(f"{self.name(key)}: expected {shown}, got {_shown(value)}; {remedy}", code="config.unsupported")

    def ignore(self, *keys: Name) -> None:
        """Count keys as read: they have no effect in the case at hand."""
        for key in keys:
            self._mark(key)

    def unread(self, inert: frozenset[Name] = INERT_KEYS) -> tuple[Name, ...]:
        """Return the keys nobody read, dotted and sorted, without those known not to affect inference."""
        own = {self._path + key for key in self._mapping if key not in self._read and key not in inert}
        for reader in self._children.values():
            own.update(reader.unread(inert))
        return tuple(sorted(own))

    # -- internals --

    def _mark(self, key: Name) -> None:
        if key in self._mapping or "." not in key:
            self._read.add(key)

    def _find(self, key: Name) -> tuple[Any] | None:
        """Return (value,) of a plain or dotted key, or None when absent."""
        if key in self._mapping:
            return (self._mapping[key],)
        head, dot, rest = key.partition(".")
        inner = self._mapping.get(head) if dot else None
        if not isinstance(inner, Mapping):
            return None
        self.child(head)
        return self._children[head]._find_marked(rest)

    def _find_marked(self, key: Name) -> tuple[Any] | None:
        self._mark(key)
        return self._find(key)

    def _lookup(self, keys: Sequence[Name]) -> tuple[Name, Any] | None:
        result = None
        for key in keys:
            found = self._find(key)
            self._mark(key)
            if result is None and found is not None and found[0] is not None:
                result = (key, found[0])
        return result

    def _typed(self, keys: Sequence[Name], default: Any, read: Callable[[Any], T], what: Name) -> Any:
        found = self._lookup(keys)
        if found is None:
            null = next((key for key in keys if self._find(key) == (None,)), None)
            if default is REQUIRED and null is not None:
                raise ConfigError(f"{self.name(null)}: expected {what}, got null; correct the config", code="config.type")
            return self.get(*keys, default=default)
        key, value = found
        try:
            return read(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"{self.name(key)}: expected {what}, got {_shown(value)}; correct the config", code="config.type"
            ) from None


def as_int(value: Any) -> int:
    """Return `value` as an int; raises TypeError for bools, fractions and everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise TypeError
    return int(value)


def as_float(value: Any) -> float:
    """Return `value` as a float, also from ``{"__float__": "Infinity"}``; raises TypeError otherwise."""
    if isinstance(value, Mapping) and set(value) == {"__float__"} and isinstance(value["__float__"], str):
        return float(value["__float__"])
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def as_bool(value: Any) -> bool:
    """Return `value` if it is a bool; raises TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError
    return value


def as_str(value: Any) -> str:
    """Return `value` if it is a string; raises TypeError otherwise."""
    if not isinstance(value, str):
        raise TypeError
    return value


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is an object; raises TypeError otherwise."""
    if not isinstance(value, Mapping):
        raise TypeError
    return value


def _shown(value: Any) -> str:
    text = "null" if value is None else ("true" if value else "false") if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
