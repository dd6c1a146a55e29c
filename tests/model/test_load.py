"""From a folder on disk to an open model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from metrale.backends.base import Backend
from metrale.errors import ConfigError, WeightError
from metrale.model.load import load_checkpoint, load_model
from tests.model import tiny

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": tiny.VOCAB, "hidden_size": tiny.HIDDEN, "intermediate_size": tiny.INNER,
    "num_hidden_layers": 2, "num_attention_heads": tiny.HEADS, "num_key_value_heads": tiny.KV_HEADS, "head_dim": tiny.DIM,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 224, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": [7, 5], "unheard_of": 1,
}  # fmt: skip


def checkpoint(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(3)

    def matrix(n: int, k: int) -> Any:
        return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)

    h, q, kv = tiny.HIDDEN, tiny.HEADS * tiny.DIM, tiny.KV_HEADS * tiny.DIM
    tensors = {"model.embed_tokens.weight": matrix(tiny.VOCAB, h), "lm_head.weight": matrix(tiny.VOCAB, h)}
    shapes = {
        "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (tiny.INNER, h), "mlp.up_proj": (tiny.INNER, h), "mlp.down_proj": (h, tiny.INNER),
    }  # fmt: skip
    for i in range(2):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = matrix(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = rng.uniform(0.5, 1.5, h).astype(np.float32)
    tensors["model.norm.weight"] = rng.uniform(0.5, 1.5, h).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tensors


def test_a_folder_becomes_a_model(device: Backend, tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    steps: list[tuple[int, int]] = []
    loaded = load_checkpoint(tmp_path, tiny.CONFIG, device, lambda done, total: steps.append((done, total)))
    assert (loaded.tokenizer, loaded.eos_ids) == (None, (5, 7))
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1] == sum(t.nbytes for name, t in tensors.items() if "norm" not in name)
    text = tiny.generate(loaded.model, tiny.prompt(20), 12)
    again = load_model(tmp_path, tiny.CONFIG, device)
    assert tiny.generate(again, tiny.prompt(20), 12) == text
    assert (again.limits.context_tokens, again.limits.vocab_size) == (224, tiny.VOCAB)


def test_a_folder_that_cannot_be_run_leaves_the_backend_usable(device: Backend, tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, tiny.CONFIG, device)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 0}))
    with pytest.raises(ConfigError):
        load_model(tmp_path, tiny.CONFIG, device)
    assert len(tiny.generate(tiny.open_model(device), tiny.prompt(5), 3)) == 3
