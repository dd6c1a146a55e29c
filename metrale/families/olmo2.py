"""OLMo 2: norms only after attention and MLP, and a norm over the whole query and key projections."""

from __future__ import annotations

from metrale.config.reader import ConfigReader
from metrale.config.spec import ModelSpec, NormSpec
from metrale.families.dense import build, dense_weight_map, read_activation, read_sizes
from metrale.weights.map import WeightMap


def read_spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of an OLMo 2 config."""
    sizes = read_sizes(config)
    bias = config.bool("attention_bias", default=False)
    return build(
        "olmo2",
        config,
        sizes,
        windows=(None,) * sizes.layers,
        act=read_activation(config, "hidden_act"),
        tied=config.bool("tie_word_embeddings", default=False),
        norm=NormSpec(sizes.eps, cast_first=False),
        placement="post",
        qk_norm="full",
        qkv_bias=bias,
        out_bias=bias,
    )


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where an OLMo 2 model's weights stand."""
    return dense_weight_map(spec)
