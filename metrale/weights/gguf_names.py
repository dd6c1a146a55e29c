"""Canonical tensor names -> the names of GGUF files.

Source: the tensor name table of the gguf package (tensor_mapping.py).
"""

from __future__ import annotations

import re
from typing import Final

_TOP: Final = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER: Final = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
# The same name norms the input of the MLP in Llama's shape and the output of the attention in these.
_AFTER_ATTENTION: Final = frozenset({"gemma2", "gemma3", "olmo2"})
_LAYER_NAME: Final = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str, architecture: str) -> str | None:
    """Return the GGUF name of a canonical name, or None when GGUF has no such tensor."""
    if name in _TOP:
        return _TOP[name]
    found = _LAYER_NAME.fullmatch(name)
    if found is None:
        return None
    layer, inner, kind = found.groups()
    if inner == "post_attention_layernorm":
        mapped: str | None = "post_attention_norm" if architecture in _AFTER_ATTENTION else "ffn_norm"
    else:
        mapped = _LAYER.get(inner)
    return None if mapped is None else f"blk.{layer}.{mapped}.{kind}"
