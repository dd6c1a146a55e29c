"""Mistral 7B: Llama's shape, with one sliding window on every layer (v0.1) or none (v0.2, v0.3)."""

from __future__ import annotations

from typing import Final

from metrale.config.reader import ConfigReader
from metrale.config.spec import ModelSpec
from metrale.families.llama import llama_spec, weight_map

__all__ = ["read_spec", "weight_map"]

DEFAULT_WINDOW: Final = 4096  # where the key is absent; null means none


def read_spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Mistral config."""
    default = None if "sliding_window" in config else DEFAULT_WINDOW
    window = config.int("sliding_window", default=default, least=1)
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    return llama_spec("mistral", config, window=window)
