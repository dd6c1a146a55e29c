"""Gemma 2: norms before and after each half layer, 1 + w norms, scaled embeddings, soft caps, every other layer windowed."""

from __future__ import annotations

from typing import Any, Final

from metrale.config.reader import ConfigReader
from metrale.config.spec import ModelSpec, NormSpec
from metrale.families.dense import build, dense_weight_map, read_activation, read_sizes, read_windows
from metrale.weights.map import WeightMap

# What the class assumes where a config is silent.
DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
}  # fmt: skip
DEFAULT_WINDOW: Final = 4096
DEFAULT_ATTENTION_CAP: Final = 50.0
DEFAULT_LOGIT_CAP: Final = 30.0


def read_spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Gemma 2 config."""
    sizes = read_sizes(config, DEFAULTS)
    config.expect("use_bidirectional_attention", False, None)
    bias = config.bool("attention_bias", default=False)
    window = config.int("sliding_window", default=default_unless_null(config, "sliding_window", DEFAULT_WINDOW), least=1)
    caps = {
        key: config.positive(key, default=default_unless_null(config, key, cap))
        for key, cap in (("attn_logit_softcapping", DEFAULT_ATTENTION_CAP), ("final_logit_softcapping", DEFAULT_LOGIT_CAP))
    }
    return build(
        "gemma2",
        config,
        sizes,
        windows=read_windows(config, sizes.layers, window, lambda layer: layer % 2 == 0),
        act=read_activation(config, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        tied=config.bool("tie_word_embeddings", default=True),
        norm=NormSpec(sizes.eps, offset=1.0, cast_first=False),
        placement="sandwich",
        scale=config.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        softcap=caps["attn_logit_softcapping"],
        qkv_bias=bias,
        out_bias=bias,
        embed_scale=sizes.hidden**0.5,
        embed_scale_rounds=True,
        logit_softcap=caps["final_logit_softcapping"],
    )


def default_unless_null(config: ConfigReader, key: str, default: Any) -> Any:
    """Return `default`, or None when the config has the key (then null means none)."""
    return None if key in config else default


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where a Gemma 2 model's weights stand."""
    return dense_weight_map(spec, plus_one=True)
