"""Real configs of the hub, read to the right specs; what a family does not implement is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from metrale.config.spec import ModelSpec
from metrale.errors import ConfigError, UnsupportedError
from metrale.families import FAMILIES, resolve

CONFIGS = Path(__file__).resolve().parents[1] / "fixtures" / "configs"


def load(name: str, **changes: Any) -> dict[str, Any]:
    found = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {key: value for key, value in found.items() if value != "<absent>"}


def spec(name: str, **changes: Any) -> ModelSpec:
    return resolve(load(name, **changes), "config.json").spec


# name: family, vocab, hidden, layers, heads, kv heads, head size, inner, tied, parameters of the matrices, context
KNOWN = {
    "Llama-3.2-1B": ("llama", 128256, 2048, 16, 32, 8, 64, 8192, True, 131072),
    "SmolLM2-135M-Instruct": ("llama", 49152, 576, 30, 9, 3, 64, 1536, True, 8192),
    "Mistral-7B-v0.3": ("mistral", 32768, 4096, 32, 32, 8, 128, 14336, False, 32768),
    "Qwen2.5-0.5B-Instruct": ("qwen2", 151936, 896, 24, 14, 2, 64, 4864, True, 32768),
    "Qwen3-0.6B": ("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, True, 40960),
    "Qwen3-8B": ("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, False, 40960),
    "gemma-3-270m": ("gemma3", 262144, 640, 18, 4, 1, 256, 2048, True, 32768),
    "gemma-3-1b-it": ("gemma3", 262144, 1152, 26, 4, 1, 256, 6912, True, 32768),
    "gemma-3-4b-it": ("gemma3", 262208, 2560, 34, 8, 4, 256, 10240, True, 131072),
    "Phi-3-mini-4k-instruct": ("phi3", 32064, 3072, 32, 32, 32, 96, 8192, False, 4096),
    "Phi-3-mini-128k-instruct": ("phi3", 32064, 3072, 32, 32, 32, 96, 8192, False, 131072),
    "OLMo-2-0425-1B": ("olmo2", 100352, 2048, 16, 16, 16, 128, 8192, False, 4096),
    "OLMo-2-1124-7B": ("olmo2", 100352, 4096, 32, 32, 32, 128, 11008, False, 4096),
}


def test_every_fixture_is_known() -> None:
    assert {p.stem for p in CONFIGS.glob("*.json")} == set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_and_no_unread_key(name: str) -> None:
    found = resolve(load(name), "config.json")
    s = found.spec
    a = s.layers[0].attention
    got = (
        s.family,
        s.vocab,
        s.hidden,
        len(s.layers),
        a.heads,
        a.kv_heads,
        a.head_dim,
        s.layers[0].mlp.size,
        s.tied,
        s.max_context,
    )
    assert got == KNOWN[name]
    assert found.unread == ()


# Elements of all tensors, norms and biases included, as published or counted in the reference classes.
@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("Llama-3.2-1B", 1_235_814_400),
        ("SmolLM2-135M-Instruct", 134_515_008),
        ("Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-8B", 8_190_735_360),
        ("gemma-3-270m", 268_098_176),
        ("gemma-3-1b-it", 999_885_952),
        ("gemma-3-4b-it", 3_880_263_168),
        ("Phi-3-mini-4k-instruct", 3_821_079_552),
        ("OLMo-2-1124-7B", 7_298_617_344),
        ("OLMo-2-0425-1B", 1_484_916_736),
    ],
)
def test_weight_maps_cover_every_element(name: str, elements: int) -> None:
    weights = resolve(load(name), "config.json").weights
    total = sum(v.size for v in weights.vectors)
    for matrix in weights.matrices:
        total += sum(p.rows.count * matrix.columns + (p.bias.count if p.bias else 0) for p in matrix.parts)
    assert total == elements


def test_llama3_rope() -> None:
    rope = spec("Llama-3.2-1B").layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor, rope.original, rope.dim) == ("llama3", 500000.0, 32.0, 8192, 64)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


def test_gemma3_windows_ropes_and_scales() -> None:
    s = spec("gemma-3-4b-it")
    full = [i for i, layer in enumerate(s.layers) if layer.attention.window is None]
    assert full == [5, 11, 17, 23, 29]
    assert [(g.kind, g.window, len(g.layers)) for g in s.kv_groups] == [("window", 1024, 29), ("full", None, 5)]
    assert s.layer_groups[4:7] == (0, 1, 0)
    local, whole = s.layers[0].attention, s.layers[5].attention
    assert local.rope is not None
    assert whole.rope is not None
    assert (local.rope.kind, local.rope.theta) == ("default", 10_000.0)
    assert (whole.rope.kind, whole.rope.theta, whole.rope.factor) == ("linear", 1_000_000.0, 8.0)
    assert local.scale == 256**-0.5
    assert local.qk_norm == "head"
    assert (s.embed_scale, s.embed_scale_rounds) == (math.sqrt(2560), True)
    assert s.layers[0].placement == "sandwich"
    assert (s.norm.offset, s.norm.cast_first) == (1.0, False)
    assert s.layers[0].mlp.act == "gelu_tanh"
    assert s.logit_softcap is None


def test_windows() -> None:
    assert {layer.attention.window for layer in spec("Phi-3-mini-4k-instruct").layers} == {2047}
    assert {layer.attention.window for layer in spec("Mistral-7B-v0.3").layers} == {None}
    assert {layer.attention.window for layer in spec("Mistral-7B-v0.3", sliding_window="<absent>").layers} == {4096}
    assert {layer.attention.window for layer in spec("Qwen2.5-0.5B-Instruct").layers} == {None}
    upper = spec("Qwen2.5-0.5B-Instruct", use_sliding_window=True)
    assert [layer.attention.window for layer in upper.layers] == [None] * 21 + [32768] * 3


def test_placements_biases_and_norm_kinds() -> None:
    olmo, qwen2, qwen3 = spec("OLMo-2-0425-1B"), spec("Qwen2.5-0.5B-Instruct"), spec("Qwen3-0.6B")
    assert (olmo.layers[0].placement, olmo.layers[0].attention.qk_norm, olmo.norm.cast_first) == ("post", "full", False)
    assert (qwen2.layers[0].attention.qkv_bias, qwen2.layers[0].attention.out_bias) == (True, False)
    assert (qwen3.layers[0].attention.qkv_bias, qwen3.layers[0].attention.qk_norm) == (False, "head")
    assert qwen3.layers[0].attention.q_rows == 2048


def test_longrope_keeps_the_outer_original_length() -> None:
    rope = spec("Phi-3-mini-128k-instruct").layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.original, rope.factor, rope.attention_factor) == ("longrope", 4096, 32.0, None)
    assert len(rope.short_factor) == len(rope.long_factor) == 48


NEW_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def test_old_and_new_rope_forms_read_alike() -> None:
    old = spec("Llama-3.2-1B")
    new = resolve(load("Llama-3.2-1B", rope_scaling="<absent>", rope_theta="<absent>", rope_parameters=NEW_LLAMA3), "c")
    assert new.spec == old
    assert new.unread == ()
    both = spec("Llama-3.2-1B", rope_parameters=NEW_LLAMA3, rope_theta=3)
    assert both == old  # the new object wins
    typed = spec("Phi-3-mini-128k-instruct")
    su = load("Phi-3-mini-128k-instruct")
    su["rope_scaling"] = {**su["rope_scaling"], "type": "su"}
    assert resolve(su, "c").spec == typed


def test_gemma3_nested_rope_parameters_read_alike() -> None:
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    changed = load(
        "gemma-3-1b-it", rope_parameters=nested, rope_theta="<absent>", rope_local_base_freq="<absent>", rope_scaling="<absent>"
    )
    found = resolve(changed, "c")
    assert found.spec == spec("gemma-3-1b-it")
    assert found.unread == ()


def test_yarn_and_dynamic_extend_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec("Qwen3-8B", rope_scaling=yarn).max_context == 131072
    assert spec("SmolLM2-135M-Instruct", rope_scaling={"type": "dynamic", "factor": 2.0}).max_context == 16384
    assert spec("SmolLM2-135M-Instruct", rope_scaling={"type": "linear", "factor": 2.0}).max_context == 8192


def test_unread_keys_are_listed() -> None:
    found = resolve(load("Qwen3-0.6B", new_trick=True, rope_parameters={"rope_theta": 1e6, "odd": 1}), "config.json")
    assert found.unread == ("new_trick", "rope_parameters.odd")


@pytest.mark.parametrize(
    ("name", "change", "subject"),
    [
        ("Llama-3.2-1B", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("Llama-3.2-1B", {"hidden_act": "relu"}, "hidden_act"),
        ("Llama-3.2-1B", {"rope_scaling": {"rope_type": "mrope"}}, "rope_type"),
        ("Llama-3.2-1B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Llama-3.2-1B", {"rope_interleaved": True}, "rope_interleaved"),
        ("Llama-3.2-1B", {"rope_scaling": "<absent>", "rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        ("Qwen2.5-0.5B-Instruct", {"layer_types": ["linear_attention"] * 24}, "layer_types"),
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Phi-3-mini-4k-instruct", {"rope_scaling": {"type": "llama3"}}, "rope_type"),
    ],
)
def test_unsupported_values_are_refused_by_name(name: str, change: dict[str, Any], subject: str) -> None:
    with pytest.raises(UnsupportedError, match=subject) as error:
        spec(name, **change)
    assert error.value.code == "config.unsupported"


@pytest.mark.parametrize(
    ("change", "code", "subject"),
    [
        ({"hidden_size": "<absent>"}, "config.missing", "hidden_size"),
        ({"rms_norm_eps": None}, "config.type", "rms_norm_eps: expected a number, got null"),
        ({"hidden_size": "2048"}, "config.type", "hidden_size"),
        ({"num_hidden_layers": 0}, "config.value", "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "config.value", "num_key_value_heads"),
        ({"head_dim": None, "num_attention_heads": 24}, "config.value", "head_dim"),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.missing", "factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2, "short_factor": [1.0], "long_factor": [1.0]}},
            "config.value",
            "short_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
            "config.value",
            "high_freq",
        ),
        ({"rope_theta": 0}, "config.value", "rope_theta"),
        ({"layer_types": ["full_attention"]}, None, ""),
    ],
)
def test_wrong_configs_are_refused_by_name(change: dict[str, Any], code: str | None, subject: str) -> None:
    if code is None:  # a key of other families: reported, not obeyed
        assert resolve(load("Llama-3.2-1B", **change), "c").unread == ("layer_types",)
        return
    with pytest.raises(ConfigError, match=subject) as error:
        spec("Llama-3.2-1B", **change)
    assert error.value.code == code


@pytest.mark.parametrize("model_type", ["mamba2", None, 3])
def test_unknown_architectures_name_the_known_ones(model_type: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"model_type: expected one of gemma2, gemma3, .*llama.*, got ") as error:
        resolve({"model_type": model_type}, "config.json")
    assert error.value.code == "config.architecture"


def test_families_load_lazily() -> None:
    assert set(FAMILIES.values()) == {"gemma2", "gemma3", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}


def test_split_shares_heads_and_feed_forward() -> None:
    half = spec("Qwen3-0.6B").split(2)
    a = half.layers[3].attention
    assert (a.heads, a.kv_heads, half.layers[3].mlp.size, half.hidden) == (8, 4, 1536, 1024)
    with pytest.raises(UnsupportedError, match="3 ") as error:
        spec("SmolLM2-135M-Instruct").split(2)
    assert error.value.code == "parallel.split"
