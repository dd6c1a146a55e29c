"""GGUF files of every family: the same logits as the transformers model they were converted from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metrale.backends.reference import ReferenceBackend
from tests.families import driver
from tests.families.test_oracle import agree
from tests.families.tiny import BASE, LLAMA3, LONGROPE, YARN, Case, build, oracle, prompt
from tests.oracles import oracle_module

oracle_module("torch", why="the oracle needs torch and transformers")
oracle_module("gguf", why="the fixtures are written by the gguf package")
pytestmark = pytest.mark.oracle

# What GGUF says by convention: Gemma's windows alternate by 2 or 6, its query scale is the head's.
GEMMA = {"query_pre_attn_scalar": BASE["head_dim"], "sliding_window": 17}
CASES = (
    Case("llama-bias", "Llama", {"attention_bias": True, "tie_word_embeddings": False}),
    Case("llama3-tied", "Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Case("llama-linear", "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    Case("mistral-window", "Mistral", {"sliding_window": 11}),
    Case("qwen2", "Qwen2"),
    Case("qwen3-yarn", "Qwen3", {"rope_parameters": YARN}),
    Case("gemma2", "Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    Case("gemma3", "Gemma3", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    Case("phi3-window", "Phi3", {"sliding_window": 21}),
    Case("phi3-long-partial", "Phi3", {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.67,
                                                          "short_factor": [1.0, 1.1], "long_factor": [1.2, 2.5]},
                                       "original_max_position_embeddings": 32}),
    Case("olmo2", "Olmo2"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gguf_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    from tests.families import gguf_files

    model, ids, backend = build(case), prompt(), ReferenceBackend()
    path = gguf_files.write(model, tmp_path / "tiny.gguf")
    agree(driver.logits(path, backend, ids, max_context=case.max_context), oracle(model, ids))


# Rows of whole blocks, so that every matrix is packed; the three placements of norms.
WIDE = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 2}  # fmt: skip
PACKED = (
    Case("llama", "Llama", WIDE),
    Case("gemma2", "Gemma2", {**WIDE, "query_pre_attn_scalar": 32, "sliding_window": 17}),
    Case("olmo2", "Olmo2", {**WIDE, "hidden_size": 128}),
)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
@pytest.mark.parametrize("form", ["q8_0", "q4_1"])
def test_int8_activations_stay_near_float_ones(case: Case, form: str, tmp_path: Path) -> None:
    """The same packed weights with int8 rows and with float rows; an unconnected buffer would be far off."""
    from tests.families import gguf_files

    path = gguf_files.write(build(case), tmp_path / "tiny.gguf", block_format=form)
    ids = prompt(length=19)
    exact = driver.logits(path, ReferenceBackend(activations="f32"), ids)
    near = driver.logits(path, ReferenceBackend(activations="int8"), ids)
    assert np.isfinite(near).all()
    assert 0 < np.abs(near - exact).max() <= 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_int8_products_of_the_cpu_equal_the_reference(case: Case, tmp_path: Path) -> None:
    """Integer sums are exact, so the two differ by float roundings, and where one of those flips a quantized value."""
    from metrale.backends.cpu.backend import CpuBackend
    from tests.families import gguf_files

    path, ids = gguf_files.write(build(case), tmp_path / "tiny.gguf", block_format="q4_1"), prompt(length=19)
    want = driver.logits(path, ReferenceBackend(activations="int8"), ids)
    backend = CpuBackend(threads=2, activations="int8")
    try:
        got = driver.logits(path, backend, ids)
    finally:
        backend.close()
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q5_1"])
def test_packed_logits_equal_transformers_with_the_same_rounded_weights(form: str, tmp_path: Path) -> None:
    import torch

    from metrale.quant.blocks import dequantize, quantize
    from tests.families import gguf_files

    model, ids = build(PACKED[0]), prompt()
    path = gguf_files.write(model, tmp_path / "tiny.gguf", block_format=form)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.ndim == 2):
            rounded = dequantize(form, quantize(form, parameter.numpy()), parameter.shape[1])
            parameter.copy_(torch.from_numpy(rounded))
    agree(driver.logits(path, ReferenceBackend(), ids), oracle(model, ids))
