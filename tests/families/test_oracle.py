"""Every family against transformers: the same logits on a whole prompt, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metrale.backends.reference import ReferenceBackend
from tests.families import driver
from tests.families.tiny import BASE, CASES, Case, build, config_of, oracle, prompt, save
from tests.oracles import oracle_module

oracle_module("torch", why="the oracle needs torch and transformers")
pytestmark = pytest.mark.oracle

RELATIVE = {"f32": 1e-4, "f16": 0.03, "bf16": 0.2}  # by activation dtype; only float32 is exact enough to prove the mathematics


def agree(got: np.ndarray, want: np.ndarray, dtype: str = "f32") -> None:
    assert got.shape == want.shape
    gap, size = np.abs(got - want).max(), np.abs(want).max()
    assert size > 0.5, "the oracle's logits say nothing"
    assert gap <= RELATIVE[dtype] * size, f"max |difference| {gap:.3g}, max |logit| {size:.3g}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_logits_equal_transformers(case: Case, backend, tmp_path: Path) -> None:
    model = build(case)
    ids = prompt()
    got = driver.logits(save(model, tmp_path), backend, ids, max_context=case.max_context)
    agree(got, oracle(model, ids), backend.activation_dtype)


GREEDY = [
    c for c in CASES if c.id in ("llama-llama3", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3", "phi3-window", "olmo2")
]


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case.id)
def test_64_greedy_tokens_equal_transformers(case: Case, tmp_path: Path) -> None:
    """One pass over prompt and the oracle's tokens: each of them is the argmax of the row before it."""
    import torch

    model = build(case)
    ids = prompt(length=30)
    whole = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=64, min_new_tokens=64, use_cache=True)[
        0
    ].tolist()
    assert len(whole) == len(ids) + 64
    got = driver.logits(save(model, tmp_path), ReferenceBackend(), whole[:-1])
    rows = got[len(ids) - 1 :]
    rows[:, BASE["eos_token_id"]] = -np.inf  # the oracle was kept from ending
    assert rows.argmax(-1).tolist() == whole[len(ids) :]


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case.id)
@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_equal_the_whole_prompt(case: Case, chunk: int, tmp_path: Path) -> None:
    ids = prompt(length=41)
    path = save(build(case), tmp_path)
    backend = ReferenceBackend()
    whole = driver.logits(path, backend, ids)
    np.testing.assert_allclose(driver.logits(path, backend, ids, chunk=chunk), whole, rtol=0, atol=1e-5 * np.abs(whole).max())


def test_gemma3_inside_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """The layout that transformers 5 saves, and the hub's, with image parts beside the text."""
    import transformers

    case = next(c for c in CASES if c.id == "gemma3")
    vision = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
              "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=config_of(case).to_dict(), vision_config=vision, mm_tokens_per_image=4,
                                       image_token_index=100)  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    from tests.families.tiny import randomise

    randomise(model, 3)
    ids = [i for i in prompt() if i != 100]
    import torch

    with torch.no_grad():
        want = (
            model(torch.tensor([ids]), use_cache=False, token_type_ids=torch.zeros(1, len(ids), dtype=torch.long))
            .logits[0]
            .numpy()
        )
    agree(driver.logits(save(model, tmp_path / "saved"), ReferenceBackend(), ids), want)
    agree(driver.logits(_as_on_the_hub(tmp_path / "saved", tmp_path / "hub"), ReferenceBackend(), ids), want)


def _as_on_the_hub(saved: Path, folder: Path) -> Path:
    """Rewrite a saved multimodal checkpoint with ``language_model.model.`` before the decoder's names."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    tensors = {}
    for name, array in load_file(saved / "model.safetensors").items():
        for old in ("model.language_model.", "language_model.model."):
            if name.startswith(old):
                name = f"language_model.model.{name.removeprefix(old)}"
        tensors[name.removeprefix("model.") if name.startswith(("model.vision", "model.multi")) else name] = array
    assert any(name.startswith("language_model.model.layers.0.") for name in tensors)
    assert any(name.startswith("vision_tower.") for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((saved / "config.json").read_text())
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-tied-bias", "gemma2"])
def test_half_precision_checkpoints(name: str, dtype: str, tmp_path: Path) -> None:
    """The weights are rounded, the arithmetic is not; Gemma's embedding scale is rounded with them."""
    import torch

    kind = getattr(torch, dtype)
    case = next(c for c in CASES if c.id == name)
    case = Case(case.id, case.name, {**case.config, "hidden_size": 42})  # sqrt(42) rounds
    path, ids = save(build(case).to(kind), tmp_path), prompt()
    wide = build(case)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(parameter.to(kind).float())
    if name == "gemma2":
        scale = wide.model.embed_tokens.embed_scale
        assert float(scale.to(kind)) != float(scale)
        scale.copy_(scale.to(kind).float())
    agree(driver.logits(path, ReferenceBackend(), ids), oracle(wide, ids))
