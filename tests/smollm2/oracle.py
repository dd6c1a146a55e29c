"""transformers' LlamaForCausalLM over the weights of a GGUF file, read without any of our code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_oracle(path: Path) -> Any:
    """Return the model in float32 with eager attention."""
    reader = gguf.GGUFReader(path)
    wanted = ("llama.", "general.architecture")
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith(wanted)}
    assert keys["general.architecture"] == "llama"
    tensors = {t.name: t for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=keys["llama.embedding_length"],
        intermediate_size=keys["llama.feed_forward_length"],
        num_hidden_layers=keys["llama.block_count"],
        num_attention_heads=keys["llama.attention.head_count"],
        num_key_value_heads=keys["llama.attention.head_count_kv"],
        max_position_embeddings=keys["llama.context_length"],
        rms_norm_eps=keys["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": keys["llama.rope.freq_base"]},
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )
    state = {_name(name): torch.from_numpy(_values(tensor, config)) for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    model.load_state_dict(state, strict=True)
    return model


def _name(name: str) -> str:
    """Return transformers' name of a GGUF tensor."""
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in top:
        return top[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _values(tensor: Any, config: LlamaConfig) -> np.ndarray:
    """Return a tensor's float32 values; GGUF interleaves the two halves of each rotary head, transformers does not."""
    values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(tensor.name.split(".")[-2])
    if heads is None:
        return values
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
