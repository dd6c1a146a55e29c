"""Qwen2 and Qwen2.5: Llama's shape with biases on q, k and v, and windows on the upper layers where switched on."""

from __future__ import annotations

from metrale.config.reader import ConfigReader
from metrale.config.spec import ModelSpec
from metrale.families.dense import Sizes, build, dense_weight_map, read_activation, read_sizes, read_windows
from metrale.weights.map import WeightMap


def read_spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Qwen2 config; the q, k, v biases have no key."""
    sizes = read_sizes(config)
    config.expect("attention_bias", True)
    return build(
        "qwen2",
        config,
        sizes,
        windows=qwen_windows(config, sizes),
        act=read_activation(config, "hidden_act"),
        tied=config.bool("tie_word_embeddings", default=False),
        qkv_bias=True,
    )


def qwen_windows(config: ConfigReader, sizes: Sizes) -> tuple[int | None, ...]:
    """Return each layer's window: `sliding_window` counts only with `use_sliding_window`, from `max_window_layers` on."""
    used = config.bool("use_sliding_window", default=False)
    window = config.int("sliding_window", default=4096 if used and "sliding_window" not in config else None, least=1)
    first = config.int("max_window_layers", default=28, least=0)
    return read_windows(
        config, sizes.layers, window if used else None, lambda layer: used and window is not None and layer >= first
    )


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where a Qwen2 model's weights stand."""
    return dense_weight_map(spec)
