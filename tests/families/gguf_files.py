"""Convert a tiny transformers model to GGUF as llama.cpp's converter does: names, keys, q/k row order, 1 + w norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from metrale.quant.blocks import BLOCKS, quantize

ARCHITECTURE = {"gemma3_text": "gemma3", "mistral": "llama"}
PERMUTED = {"llama"}


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def write(model: Any, path: Path, *, block_format: str | None = None) -> Path:
    """Write `model` to `path`, matrices in `block_format` where given, else float32."""
    config = model.config
    arch = ARCHITECTURE.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, arch)
    _keys(writer, config, arch, head_dim)
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    mapping = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    for name, array in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, kind = name.rpartition(".")
        for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if arch in PERMUTED and base.endswith(f"self_attn.{letter}_proj"):
                array = permuted(array, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        _tensor(writer, f"{mapping.get_name(base)}.{kind}", array, block_format)
    _rope_tensors(writer, config, head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, block_format: str | None) -> None:
    array = np.ascontiguousarray(array, np.float32)
    if array.ndim == 2 and block_format in BLOCKS and array.shape[1] % BLOCKS[block_format].block == 0:
        writer.add_tensor(name, quantize(block_format, array), raw_dtype=gguf.GGMLQuantizationType[block_format.upper()])
    else:
        writer.add_tensor(name, array)


def _keys(writer: gguf.GGUFWriter, config: Any, arch: str, head_dim: int) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors((1 + np.log(factor) / np.log(original)) ** 0.5 if factor > 1 else 1.0)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_bos_token_id(config.bos_token_id)


def _rope_tensors(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    """Write the divisors of the kinds that GGUF stores as tensors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
    if rope.get("rope_type") == "longrope":
        for side in ("long", "short"):
            writer.add_tensor(f"rope_factors_{side}.weight", np.asarray(rope[f"{side}_factor"], np.float32))
