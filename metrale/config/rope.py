"""Read rope settings of a config, old and new forms, into a `RopeSpec`.

New (transformers 5): one object ``rope_parameters``, or one a layer type inside it. Old: ``rope_theta``, ``rope_scaling``
and ``partial_rotary_factor`` beside each other; the type may be called ``type`` or ``rope_type``. The new form wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from metrale.config.reader import ConfigReader
from metrale.config.spec import RopeKind, RopeSpec
from metrale.errors import ConfigError, UnsupportedError

KINDS: Final[tuple[RopeKind, ...]] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
MAX_THETA: Final = 1e12
MAX_NUMBER: Final = 1e6  # of factors and bounds
_FACTORS: Final = "factors"  # divisors stored in a GGUF file; not a config.json form


def read_rope(
    config: ConfigReader,
    head_dim: int,
    max_position: int,
    *,
    default_theta: float = 10_000.0,
    theta_key: str = "rope_theta",
    layer_type: str | None = None,
    scaled: bool = True,
    partial: bool = False,
    kinds: tuple[str, ...] = KINDS,
    aliases: Mapping[str, RopeKind] | None = None,
) -> RopeSpec:
    """Return the rope of a config, or of one of its layer types.

    max_position: the config's max_position_embeddings. theta_key: the old form's name of theta. scaled: whether the old
    form's ``rope_scaling`` applies here. partial: whether the family rotates a part of each head. aliases: other names
    of kinds.
    Raises: UnsupportedError ``config.unsupported`` for another kind or an unexpected partial rotary; ConfigError
            ``config.missing``, ``config.type``, ``config.value``.
    """
    new, old = _objects(config, layer_type, scaled)
    source = _Pair(new, old)
    theta = source.number("rope_theta", default=None)
    if theta is None:
        theta = config.positive(theta_key, default=default_theta)
    else:
        config.ignore(theta_key)
    if not 1 < theta <= MAX_THETA:
        raise ConfigError(
            f"{config.name(theta_key)}: expected a number above 1 and at most {MAX_THETA:g}, got {theta:g}; correct the config",
            code="config.value",
        )
    kind: Any = source.text("rope_type", "type", default="default")
    kind = (aliases or {}).get(kind, kind)
    if kind not in (*kinds, _FACTORS):
        raise UnsupportedError(
            f"{source.name('rope_type')}: expected {', '.join(kinds)}, got {kind!r}; this build does not implement it",
            code="config.unsupported",
        )
    part = source.positive("partial_rotary_factor", default=None)
    if part is None:
        part = config.positive("partial_rotary_factor", default=1.0)
    else:
        config.ignore("partial_rotary_factor")
    dim = int(head_dim * part)
    if part != 1.0 and not partial:
        raise UnsupportedError(
            f"{source.name('partial_rotary_factor')}: expected 1 in this family, got {part}; this build does not implement it",
            code="config.unsupported",
        )
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError(
            f"{source.name('partial_rotary_factor')}: expected an even number of rotated dims up to {head_dim}, got {dim}; "
            "correct the config",
            code="config.value",
        )
    return _scaling(config, source, kind, dim, theta, max_position)


def _objects(config: ConfigReader, layer_type: str | None, scaled: bool) -> tuple[ConfigReader | None, ConfigReader | None]:
    new = config.child("rope_parameters")
    if new is not None and layer_type is not None:
        inner = new.child(layer_type) if layer_type in new else None
        new = inner if inner is not None or _is_nested(new) else new if scaled else None
    elif new is not None and _is_nested(new):
        raise UnsupportedError(
            f"{config.name('rope_parameters')}: expected one object for all layers, got one a layer type; this build "
            "does not implement it in this family",
            code="config.unsupported",
        )
    old = config.child("rope_scaling")
    return new, old if scaled else None


def _is_nested(rope: ConfigReader) -> bool:
    return "full_attention" in rope or "sliding_attention" in rope


class _Pair:
    """Reads a key from the new object, else from the old one."""

    def __init__(self, new: ConfigReader | None, old: ConfigReader | None) -> None:
        self.readers = tuple(r for r in (new, old) if r is not None)
        self.prefix = self.readers[0].name("") if self.readers else "rope_parameters."

    def name(self, key: str) -> str:
        return f"{self.prefix}{key}"

    def _call(self, method: str, keys: tuple[str, ...], default: Any, **options: Any) -> Any:
        value = None
        for reader in self.readers:
            found = getattr(reader, method)(*keys, default=None, **options)
            value = found if value is None else value
        if value is None and default is _MISSING:
            raise ConfigError(
                f"{self.name(keys[0])}: expected a value, got none; this kind of rope needs it", code="config.missing"
            )
        return default if value is None else value

    def positive(self, *keys: str, default: Any) -> Any:
        """Return a number above 0 that leaves the table finite."""
        value = self._call("positive", keys, default)
        if value is not None and value > MAX_NUMBER:
            raise ConfigError(
                f"{self.name(keys[0])}: expected at most {MAX_NUMBER:g}, got {value:g}; correct the config", code="config.value"
            )
        return value

    def number(self, *keys: str, default: Any) -> Any:
        return self._call("positive", keys, default)

    def text(self, *keys: str, default: Any) -> Any:
        return self._call("str", keys, default)

    def flag(self, *keys: str, default: Any) -> Any:
        return self._call("bool", keys, default)

    def length(self, *keys: str, default: Any) -> Any:
        return self._call("int", keys, default, least=1)

    def divisors(self, key: str, count: Any) -> tuple[float, ...]:
        found: tuple[float, ...] = self._call("list", (key,), _MISSING, of=float, length=count)
        if not all(1 / MAX_NUMBER <= x <= MAX_NUMBER for x in found):
            raise ConfigError(
                f"{self.name(key)}: expected numbers from {1 / MAX_NUMBER:g} to {MAX_NUMBER:g}, got {found[:4]}...; "
                "correct the config",
                code="config.value",
            )
        return found


_MISSING: Final = object()


def _scaling(config: ConfigReader, source: _Pair, kind: RopeKind, dim: int, theta: float, most: int) -> RopeSpec:
    top = config.int("original_max_position_embeddings", default=None, least=1)
    inner = source.length("original_max_position_embeddings", default=None)
    original = top or inner or most
    if kind == "default":
        return RopeSpec(dim, theta)
    if kind == _FACTORS:
        return RopeSpec(dim, theta, "factors", short_factor=source.divisors("factors", dim // 2))
    if kind == "linear":
        return RopeSpec(dim, theta, kind, source.positive("factor", default=_MISSING))
    if kind == "dynamic":
        return RopeSpec(dim, theta, kind, source.positive("factor", default=_MISSING), max_position=most)
    if kind == "llama3":
        low, high = (source.positive(f"{side}_freq_factor", default=_MISSING) for side in ("low", "high"))
        if not low < high:
            raise ConfigError(
                f"{source.name('high_freq_factor')}: expected more than low_freq_factor {low}, got {high}; correct the config",
                code="config.value",
            )
        return RopeSpec(
            dim,
            theta,
            kind,
            source.positive("factor", default=_MISSING),
            original=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = source.positive("factor", default=None)
    factor = most / original if factor is None else factor
    attention = source.positive("attention_factor", default=None)
    if kind == "longrope" and original < 2:
        raise ConfigError(
            f"{source.name('original_max_position_embeddings')}: expected at least 2, got {original}; correct the config",
            code="config.value",
        )
    if kind == "longrope":
        return RopeSpec(
            dim,
            theta,
            kind,
            factor,
            original=original,
            attention_factor=attention,
            short_factor=source.divisors("short_factor", dim // 2),
            long_factor=source.divisors("long_factor", dim // 2),
        )
    return RopeSpec(
        dim,
        theta,
        kind,
        factor,
        original=original,
        attention_factor=attention,
        beta_fast=source.positive("beta_fast", default=32.0),
        beta_slow=source.positive("beta_slow", default=1.0),
        truncate=source.flag("truncate", default=True),
        mscale=source.positive("mscale", default=None),
        mscale_all_dim=source.positive("mscale_all_dim", default=None),
    )
