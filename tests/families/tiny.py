"""Tiny checkpoints saved by transformers, every vector randomised, and the oracle's logits on a prompt.

Sizes are pairwise different and odd where they may be; kv_heads < heads; heads * head_dim != hidden; windows are shorter
than the prompt. Default weights would hide mistakes: norms of ones hide 1 + w, zero biases hide the biases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = 53
BASE = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 59,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 0.004,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 7000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 7.0],
    "rope_theta": 9000.0,
}


@dataclass(frozen=True)
class Case:
    """One tiny model. name: transformers' class stem. max_context: what the tables are made for (None: the config's)."""

    id: str
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    max_context: int | None = None


def _qwen_windows(count: int) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": count}


CASES = (
    Case("llama", "Llama"),
    Case("llama-tied-bias", "Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    Case("llama-llama3", "Llama", {"rope_parameters": LLAMA3}),
    Case("llama-linear", "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    Case("llama-yarn", "Llama", {"rope_parameters": YARN}),
    Case(
        "llama-dynamic-within", "Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, 60
    ),
    Case(
        "llama-dynamic-beyond",
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, "max_position_embeddings": 40},
        PROMPT,
    ),
    Case("mistral", "Mistral", {"sliding_window": None}),
    Case("mistral-window", "Mistral", {"sliding_window": 11, "tie_word_embeddings": True}),
    Case("qwen2", "Qwen2"),
    Case("qwen2-windows-tied", "Qwen2", {**_qwen_windows(1), "tie_word_embeddings": True}),
    Case("qwen3", "Qwen3"),
    Case("qwen3-bias-yarn-windows", "Qwen3", {**_qwen_windows(2), "attention_bias": True, "rope_parameters": YARN}),
    Case(
        "gemma2",
        "Gemma2",
        {"sliding_window": 17, "query_pre_attn_scalar": 23, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    Case(
        "gemma2-untied-no-caps",
        "Gemma2",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    Case(
        "gemma3",
        "Gemma3",
        {"sliding_window": 15, "query_pre_attn_scalar": 19, "sliding_window_pattern": 2, "num_hidden_layers": 5},
    ),
    Case(
        "gemma3-linear",
        "Gemma3",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 31,
            "num_hidden_layers": 7,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 8000.0},
            },
        },
    ),
    Case("phi3", "Phi3"),
    Case("phi3-window", "Phi3", {"sliding_window": 21}),
    Case("phi3-short", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64),
    Case("phi3-long", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    Case(
        "phi3-partial",
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.67}},
    ),
    Case("olmo2", "Olmo2"),
    Case("olmo2-tied-bias", "Olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
)


def config_of(case: Case) -> Any:
    import transformers

    stem = "Gemma3Text" if case.name == "Gemma3" else case.name
    values = {**BASE, **case.config}
    if case.name in ("Phi3", "Olmo2"):  # no head_dim of their own
        values.pop("head_dim")
    return getattr(transformers, f"{stem}Config")(**values)


def randomise(model: Any, seed: int) -> None:
    """Fill every parameter: matrices to keep activations near 1, vectors around the value that means nothing."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.6 / parameter.shape[1] ** 0.5))
            elif name.endswith("bias") or "Gemma" in type(model).__name__:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(1 + 0.4 * noise)


def build(case: Case, seed: int = 11) -> Any:
    """Return the transformers model of a case, float32, eager attention."""
    import torch
    import transformers

    torch.set_num_threads(1)  # tiny matrices: more threads only wait for one another
    config = config_of(case)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{case.name}ForCausalLM")(config).float().eval()
    randomise(model, seed)
    return model


def prompt(vocab: int = BASE["vocab_size"], length: int = PROMPT, seed: int = 7) -> list[int]:  # type: ignore[assignment]
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab, length)]


def oracle(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy())


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
