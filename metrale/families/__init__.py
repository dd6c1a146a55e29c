"""Model families: `model_type` -> the module that reads its config and names its weights.

A module has ``read_spec(config: ConfigReader) -> ModelSpec`` and ``weight_map(spec: ModelSpec) -> WeightMap``. One file a
family; a family that differs from another by flags wraps it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol, cast

from metrale.config.reader import ConfigReader
from metrale.config.spec import ModelSpec
from metrale.errors import UnsupportedError
from metrale.weights.map import WeightMap

FAMILIES: Final[dict[str, str]] = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "mistral",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


class Family(Protocol):
    """What a family module offers."""

    def read_spec(self, config: ConfigReader) -> ModelSpec:
        """Return the spec of a config; refuses what the family does not implement."""

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        """Return where each weight of the spec stands in a checkpoint."""


class Resolved(NamedTuple):
    """A config understood: its spec, its weight map, and the config keys nobody read."""

    spec: ModelSpec
    weights: WeightMap
    unread: tuple[str, ...]


def find(model_type: object, source: str) -> Family:
    """Return the family of a model type.

    Raises: UnsupportedError ``config.architecture`` naming the supported ones.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedError(
            f"{source}: model_type: expected one of {known}, got {model_type!r}; this build does not implement it",
            code="config.architecture",
        )
    return cast(Family, importlib.import_module(f"metrale.families.{FAMILIES[model_type]}"))


def resolve(mapping: Mapping[str, Any], source: str) -> Resolved:
    """Turn a config (of config.json, or of `metrale.config.gguf`) into spec and weight map.

    Raises: UnsupportedError ``config.architecture``, ``config.unsupported``; ConfigError ``config.missing``,
            ``config.type``, ``config.value``.
    """
    family = find(mapping.get("model_type"), source)
    config = ConfigReader(mapping, source)
    config.expect("quantization_config", None, why="load an unquantized checkpoint, or a GGUF file")
    config.expect("is_encoder_decoder", False, None)
    config.expect("add_cross_attention", False, None)
    spec = family.read_spec(config)
    return Resolved(spec, family.weight_map(spec), config.unread())
