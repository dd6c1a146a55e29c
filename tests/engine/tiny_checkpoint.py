"""A tiny llama checkpoint written by hand, as transformers would save it, with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM, CONTEXT = 32, 48, 2, 4, 2, 8, 96
SPECIALS = ("<|end|>", "<|user|>", "<|model|>")
VOCAB = 256 + len(SPECIALS)
END = 256
TEMPLATE = "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'model' }}|>{{ m.content }}{% endfor %}<|model|>"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END,
    "dtype": "float32",
}


def tensors(seed: int = 1) -> dict[str, np.ndarray]:
    """Return random weights by the names transformers gives them."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN) * 4}
    found["model.norm.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{norm}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
        found[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            found[f"{layer}.mlp.{name}_proj.weight"] = matrix(*shape)
    return found


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json (one token a byte) and tokenizer_config.json with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIALS[0], "chat_template": TEMPLATE}))


def write(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Write a checkpoint into a new folder and return it. config: keys over CONFIG (None removes one)."""
    folder.mkdir()
    merged = {key: value for key, value in {**CONFIG, **(config or {})}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    found = tensors() if weights is None else weights
    if shards == 1:
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        placed = {name: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(found))}
        for file in set(placed.values()):
            save_file({n: found[n] for n, f in placed.items() if f == file}, folder / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": sum(t.nbytes for t in found.values())}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_tokenizer(folder)
    return folder
