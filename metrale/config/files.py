"""Read a model folder's config.json and generation_config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale.config.reader import as_float, as_int
from metrale.errors import ConfigError

MAX_CONFIG_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint says about generating from it; None where it says nothing.

    eos_ids: the union of what config.json and generation_config.json name, ascending.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's configuration as read: the mapping a family turns into a spec, and the generation defaults.

    source: where it came from, for error sentences. container: "safetensors" or "gguf".
    """

    mapping: Mapping[str, Any]
    generation: GenerationDefaults
    source: str
    container: str = "safetensors"


def load_config(folder: Path) -> ModelConfig:
    """Read a folder's config.json and, where present, generation_config.json.

    Raises: ConfigError ``config.not_found``, ``config.json``, ``config.type``.
    """
    path = folder / "config.json"
    mapping = read_json(path)
    generation = folder / "generation_config.json"
    extra = read_json(generation) if generation.exists() else {}
    return ModelConfig(mapping, generation_defaults(mapping, extra, str(path), str(generation)), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file whose outermost value is an object.

    Raises: ConfigError ``config.not_found``, ``config.unreadable``, ``config.json``.
    """
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{path}: expected at most {MAX_CONFIG_BYTES} bytes, got {size}; this is not a config file", code="config.json"
            )
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path}: expected a config file, got nothing; fetch it together with the weights", code="config.not_found"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a readable file, got {error}; check its permissions", code="config.unreadable"
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8
        raise ConfigError(f"{path}: expected JSON, got {error}; fetch it again", code="config.json") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got a {type(value).__name__}; fetch it again", code="config.json")
    return value


def generation_defaults(
    config: Mapping[str, Any], extra: Mapping[str, Any], source: str, extra_source: str = "generation_config.json"
) -> GenerationDefaults:
    """Combine a config and a generation config: end ids are joined, of the rest the generation config wins.

    source, extra_source: where the two came from, for error sentences.
    Raises: ConfigError ``config.type``.
    """
    inner = config.get("text_config")
    places = ((extra, extra_source), (config, source), (inner if isinstance(inner, Mapping) else {}, source))
    eos: set[int] = set()
    for place, name in places:
        eos.update(_ids(place.get("eos_token_id"), f"{name}: eos_token_id"))

    def number(key: str, read: Any) -> Any:
        value, name = next(((place[key], name) for place, name in places if place.get(key) is not None), (None, ""))
        if value is None:
            return None
        try:
            result = read(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"{name}: {key}: expected a number, got {value!r}; correct the config", code="config.type"
            ) from None
        return result if math.isfinite(result) else None

    def first_id(key: str) -> int | None:
        ids = next((_ids(place[key], f"{name}: {key}") for place, name in places if place.get(key) is not None), ())
        return ids[0] if ids else None

    sample = extra.get("do_sample")
    return GenerationDefaults(
        eos_ids=tuple(sorted(eos)),
        bos_id=first_id("bos_token_id"),
        pad_id=first_id("pad_token_id"),
        do_sample=sample if isinstance(sample, bool) else None,
        temperature=number("temperature", as_float),
        top_k=number("top_k", as_int),
        top_p=number("top_p", as_float),
        min_p=number("min_p", as_float),
        repetition_penalty=number("repetition_penalty", as_float),
    )


def _ids(value: Any, source: str) -> tuple[int, ...]:
    """Return token ids from an int, a list of ints or null; a negative id means none."""
    if value is None:
        return ()
    try:
        found = tuple(as_int(v) for v in (value if isinstance(value, list | tuple) else (value,)))
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{source}: expected a token id or a list of them, got {value!r}; correct the config", code="config.type"
        ) from None
    return tuple(i for i in found if i >= 0)
