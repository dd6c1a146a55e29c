"""Phi-3 and Phi-4-mini: Llama's shape with fused qkv and gate_up matrices, longrope, partial rotary, windows."""

from __future__ import annotations

from typing import Final

from metrale.config.reader import ConfigReader
from metrale.config.rope import read_rope
from metrale.config.spec import ModelSpec
from metrale.families.dense import build, dense_weight_map, read_activation, read_sizes
from metrale.weights.map import WeightMap

ROPE_KINDS: Final = ("default", "longrope")


def read_spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Phi-3 config; its window holds on every layer."""
    sizes = read_sizes(config)
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    window = config.int("sliding_window", default=None, least=1)
    rope = read_rope(
        config,
        sizes.head_dim,
        sizes.max_position,
        partial=True,
        kinds=ROPE_KINDS,
        aliases={"su": "longrope", "yarn": "longrope"},
    )
    return build(
        "phi3",
        config,
        sizes,
        windows=(window,) * sizes.layers,
        act=read_activation(config, "hidden_act"),
        tied=config.bool("tie_word_embeddings", default=False),
        rope=rope,
    )


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where a Phi-3 model's weights stand."""
    return dense_weight_map(spec, fused=True)
