"""Qwen3 (dense): Qwen2's shape with a norm over each query and key head, and its own head size."""

from __future__ import annotations

from typing import Final

from metrale.config.reader import ConfigReader
from metrale.config.spec import ModelSpec
from metrale.families.dense import build, read_activation, read_sizes
from metrale.families.qwen2 import qwen_windows, weight_map

__all__ = ["read_spec", "weight_map"]

DEFAULT_HEAD_DIM: Final = 128


def read_spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Qwen3 config."""
    sizes = read_sizes(config, {"head_dim": DEFAULT_HEAD_DIM})
    bias = config.bool("attention_bias", default=False)
    return build(
        "qwen3",
        config,
        sizes,
        windows=qwen_windows(config, sizes),
        act=read_activation(config, "hidden_act"),
        tied=config.bool("tie_word_embeddings", default=False),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
    )
