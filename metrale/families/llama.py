"""Llama 2 and 3.x, SmolLM2, TinyLlama and other models of that shape."""

from __future__ import annotations

from metrale.config.reader import ConfigReader
from metrale.config.spec import ModelSpec
from metrale.families.dense import build, dense_weight_map, read_activation, read_sizes
from metrale.weights.map import WeightMap


def read_spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Llama config."""
    config.expect("rope_interleaved", False)
    return llama_spec("llama", config, window=None)


def llama_spec(family: str, config: ConfigReader, *, window: int | None) -> ModelSpec:
    """Return the spec of a Llama-shaped model whose layers all have the same window."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", default=False)
    return build(
        family,
        config,
        sizes,
        windows=(window,) * sizes.layers,
        act=read_activation(config, "hidden_act"),
        tied=config.bool("tie_word_embeddings", default=False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.bool("mlp_bias", default=False),
    )


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where a Llama-shaped model's weights stand."""
    return dense_weight_map(spec, interleaved=True)
