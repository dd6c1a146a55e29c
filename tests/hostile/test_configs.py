"""Damaged configs and metadata: a spec or one of our errors, never another exception, never a flood of memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.config.files import generation_defaults
from metrale.config.gguf import ARCHITECTURES, config_from_gguf
from metrale.errors import ConfigError, MetraleError
from metrale.families import resolve
from tests.unit.test_config_files import TENSORS, Stored, metadata

T = TypeVar("T")
CONFIGS = sorted((Path(__file__).resolve().parents[1] / "fixtures" / "configs").glob("*.json"))
VALUES = [json.loads(path.read_text()) for path in CONFIGS]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63, 10**30, 1e-30, 1e300]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["default", "yarn", "linear", "llama3", "longrope", "dynamic", "silu"]),
)
VALUE = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
EXTRA = [
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "head_dim",
    "sliding_window",
    "text_config",
    "partial_rotary_factor",
    "quantization_config",
    "use_sliding_window",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "attention_bias",
]


def attempt(call: Callable[[], T]) -> T | None:
    """Return what a call returns, or None after one of our errors, whose sentence is checked."""
    try:
        return call()
    except MetraleError as error:
        sentence = str(error)
    assert ": expected" in sentence
    assert ", got " in sentence
    return None


@settings(max_examples=150)
@given(st.sampled_from(VALUES), st.data())
def test_a_damaged_config_gives_a_spec_or_our_error(config: dict[str, Any], data: st.DataObject) -> None:
    changed = dict(config)
    for key in data.draw(st.lists(st.sampled_from([*config, *EXTRA]), min_size=1, max_size=3)):
        changed[key] = data.draw(VALUE)
    attempt(lambda: generation_defaults(changed, {}, "config.json"))
    found = attempt(lambda: resolve(changed, "config.json"))
    if found is None:
        return
    spec = found.spec
    assert all(math.isfinite(layer.attention.scale) for layer in spec.layers)
    assert spec.max_context >= 1


ROPE_KEYS = [
    "factor",
    "rope_type",
    "type",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
]


@settings(max_examples=120)
@given(st.sampled_from(["yarn", "linear", "llama3", "longrope", "dynamic"]), st.data())
def test_a_damaged_rope_gives_finite_tables_or_our_error(kind: str, data: st.DataObject) -> None:
    import numpy as np

    from metrale.layers.rope import rope_table

    base = {
        "rope_type": kind,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
    }
    for key in data.draw(st.lists(st.sampled_from(ROPE_KEYS), max_size=3)):
        base[key] = data.draw(SCALARS)
    config = {**next(v for v in VALUES if v["model_type"] == "llama" and v["num_hidden_layers"] == 30), "rope_scaling": base}
    found = attempt(lambda: resolve(config, "config.json"))
    if found is None:
        return
    rope = found.spec.layers[0].attention.rope
    assert rope is not None
    with np.errstate(all="ignore"):
        table = rope_table(rope, 70)
    assert np.isfinite(table).all()


@settings(max_examples=120)
@given(st.sampled_from(sorted(ARCHITECTURES)), st.data())
def test_damaged_gguf_metadata_gives_a_spec_or_our_error(arch: str, data: st.DataObject) -> None:
    found = metadata(arch)
    extra = [
        f"{arch}.{key}"
        for key in (
            "attention.key_length",
            "attention.value_length",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scaling.type",
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "rope.scaling.attn_factor",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "attention.scale",
            "final_logit_softcapping",
        )
    ]
    for key in data.draw(st.lists(st.sampled_from([*found, *extra]), min_size=1, max_size=3)):
        found[key] = data.draw(
            st.one_of(SCALARS.filter(lambda x: x is not None), st.lists(SCALARS.filter(lambda x: x is not None), max_size=3))
        )
    tensors = data.draw(st.sampled_from([TENSORS, {}, {"token_embd.weight": Stored(5)}]))
    config = attempt(lambda: config_from_gguf(found, tensors, "m.gguf"))
    if config is not None:
        attempt(lambda: resolve(config.mapping, config.source))


@pytest.mark.parametrize("layers", [10**9, 2**62])
def test_a_flood_of_layers_is_refused_before_it_costs_memory(layers: int) -> None:
    with pytest.raises(ConfigError, match="expected"):
        resolve({**VALUES[0], "num_hidden_layers": layers}, "config.json")
    with pytest.raises(ConfigError, match="expected"):
        config_from_gguf(metadata("gemma3", block_count=layers, **{"attention.sliding_window": 4}), TENSORS, "m.gguf")
