"""Gemma 3, text: Gemma 2's shape with a norm over each query and key head, two ropes, five windowed layers to a full one.

The text part of the multimodal checkpoints (``text_config``) is read too; their image parts are left aside.
"""

from __future__ import annotations

from typing import Any, Final

from metrale.config.reader import ConfigReader
from metrale.config.rope import read_rope
from metrale.config.spec import ModelSpec, NormSpec
from metrale.families.dense import IGNORED_VISION, build, dense_weight_map, read_activation, read_sizes, read_windows
from metrale.families.gemma2 import default_unless_null
from metrale.weights.map import WeightMap

# What the class assumes where a config is silent: gemma-3-4b says little more than its hidden size and layers.
DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
}  # fmt: skip
DEFAULT_WINDOW: Final = 4096
DEFAULT_PERIOD: Final = 6
GLOBAL_THETA: Final = 1_000_000.0
LOCAL_THETA: Final = 10_000.0


def read_spec(config: ConfigReader) -> ModelSpec:
    """Return the spec of a Gemma 3 text config, or of the text part of a multimodal one."""
    top = config
    inner = config.child("text_config") if config.get("model_type", default=None) == "gemma3" else None
    if inner is not None:
        config = inner
        config.expect("model_type", "gemma3_text")
    sizes = read_sizes(config, DEFAULTS)
    config.expect("use_bidirectional_attention", False, None)
    config.expect("attn_logit_softcapping", None)
    bias = config.bool("attention_bias", default=False)
    window = config.int("sliding_window", default=default_unless_null(config, "sliding_window", DEFAULT_WINDOW), least=1)
    period = config.int("sliding_window_pattern", "_sliding_window_pattern", default=DEFAULT_PERIOD, least=1)
    rope = read_rope(config, sizes.head_dim, sizes.max_position, default_theta=GLOBAL_THETA, layer_type="full_attention")
    local = read_rope(
        config,
        sizes.head_dim,
        sizes.max_position,
        default_theta=LOCAL_THETA,
        theta_key="rope_local_base_freq",
        layer_type="sliding_attention",
        scaled=False,
    )
    tied = config.bool("tie_word_embeddings", default=True)
    if inner is not None:  # in a multimodal file the outer key decides
        tied = top.bool("tie_word_embeddings", default=True)
    return build(
        "gemma3",
        config,
        sizes,
        windows=read_windows(config, sizes.layers, window, lambda layer: (layer + 1) % period != 0),
        act=read_activation(config, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        tied=tied,
        rope=rope,
        local_rope=local,
        norm=NormSpec(sizes.eps, offset=1.0, cast_first=False),
        placement="sandwich",
        scale=config.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        embed_scale=sizes.hidden**0.5,
        embed_scale_rounds=True,
        logit_softcap=config.positive("final_logit_softcapping", default=None),
    )


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return where a Gemma 3 model's weights stand."""
    return dense_weight_map(spec, plus_one=True, ignored=IGNORED_VISION)
