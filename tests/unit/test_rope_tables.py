"""Rope tables against transformers' own frequency functions, both sides of the rules that depend on a length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metrale.config.reader import ConfigReader
from metrale.config.rope import read_rope
from metrale.config.spec import RopeSpec
from metrale.layers.rope import frequencies, rope_table
from tests.oracles import oracle_module

BASE = {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 24, "num_hidden_layers": 1, "vocab_size": 32}
CASES: dict[str, tuple[dict[str, Any], int, int]] = {  # parameters, max_position_embeddings, context
    "default": ({"rope_type": "default", "rope_theta": 10000.0}, 4096, 4096),
    "big-theta": ({"rope_type": "default", "rope_theta": 1e6}, 4096, 100_000),
    "linear": ({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, 4096, 4096),
    "dynamic-within": ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, 512, 512),
    "dynamic-beyond": ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, 512, 1500),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
            "rope_theta": 500000.0,
        },
        4096,
        4096,
    ),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}, 512, 512),
    "yarn-options": (
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 150000.0,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "truncate": False,
            "mscale": 1.2,
            "mscale_all_dim": 0.7,
        },
        1024,
        1024,
    ),
    "yarn-attention-factor": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "attention_factor": 1.7,
        },
        512,
        512,
    ),
    "longrope-short": (
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0 + 0.1 * i for i in range(12)],
            "long_factor": [1.5 + 2.0 * i for i in range(12)],
            "factor": 4.0,
        },
        512,
        128,
    ),
    "longrope-long": (
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 128,
            "short_factor": [1.0 + 0.1 * i for i in range(12)],
            "long_factor": [1.5 + 2.0 * i for i in range(12)],
            "factor": 4.0,
        },
        512,
        129,
    ),
}


def read(parameters: dict[str, Any], most: int) -> RopeSpec:
    return read_rope(ConfigReader({"rope_parameters": parameters}, "c"), BASE["head_dim"], most)


@pytest.mark.oracle
@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name: str) -> None:
    oracle_module("torch", why="the oracle needs torch and transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, most, context = CASES[name]
    config = LlamaConfig(**BASE, max_position_embeddings=most, rope_parameters=dict(parameters))
    kind = parameters["rope_type"]
    if kind == "default":
        want, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        want, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=context)
    got, scale = frequencies(read(parameters, most), context)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want.numpy(), rtol=3e-7)
    assert scale == pytest.approx(factor, rel=1e-7)


def test_the_table_holds_cosines_then_sines_times_the_factor() -> None:
    spec = read(*CASES["yarn"][:2])
    frequency, factor = frequencies(spec, 300)
    table = rope_table(spec, 300)
    assert table.shape == (300, 24)
    assert table.dtype == np.float32
    angle = (np.arange(300, dtype=np.float32)[:, None] * frequency).astype(np.float64)
    np.testing.assert_allclose(table[:, :12], factor * np.cos(angle), rtol=0, atol=2e-7)
    np.testing.assert_allclose(table[:, 12:], factor * np.sin(angle), rtol=0, atol=2e-7)


def test_a_table_made_in_pieces_has_no_seams() -> None:
    spec = read(*CASES["default"][:2])
    assert np.array_equal(rope_table(spec, 5000)[4090:4100], rope_table(spec, 4100)[4090:])


def test_the_context_chooses_once() -> None:
    dynamic, long = (read(*CASES[name][:2]) for name in ("dynamic-beyond", "longrope-long"))
    assert np.array_equal(frequencies(dynamic, 100)[0], frequencies(dynamic, 512)[0])
    assert (frequencies(dynamic, 513)[0][1:] < frequencies(dynamic, 512)[0][1:]).all()
    assert np.array_equal(frequencies(long, 5)[0], frequencies(long, 128)[0])
    assert (frequencies(long, 129)[0] < frequencies(long, 128)[0]).all()
    assert not np.allclose(rope_table(long, 129)[100], rope_table(long, 128)[100])


def test_partial_rotary_uses_the_rotated_size() -> None:
    spec = read_rope(ConfigReader({"rope_theta": 100.0, "partial_rotary_factor": 0.5}, "c"), 24, 64, partial=True)
    assert spec.dim == 12
    np.testing.assert_allclose(frequencies(spec, 64)[0], 100.0 ** -(np.arange(0, 12, 2) / 12), rtol=1e-6)


def test_stored_divisors() -> None:
    spec = read({"rope_type": "factors", "rope_theta": 10000.0, "factors": [1.0] * 6 + [8.0] * 6}, 64)
    plain = frequencies(read(*CASES["default"][:2]), 64)[0]
    np.testing.assert_allclose(frequencies(spec, 64)[0], plain / np.array([1.0] * 6 + [8.0] * 6, np.float32), rtol=1e-6)
