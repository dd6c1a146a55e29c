"""Turn GGUF metadata into the dict that a config.json would hold, so that each family has one path.

Key names: the GGUF specification (ggml repository, docs/gguf.md). What GGUF leaves to the reading program (Gemma's
window pattern, the 27B models' query scale, tied heads) is filled in here as llama.cpp does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from metrale.config.files import GenerationDefaults, ModelConfig, generation_defaults
from metrale.config.reader import MAX_INT, MAX_LAYERS, ConfigReader, as_int
from metrale.errors import ConfigError, UnsupportedError

# GGUF architecture -> model_type. Mistral 7B files say "llama".
ARCHITECTURES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "phi3": "phi3", "olmo2": "olmo2",
}  # fmt: skip

# Gemma sizes whose query scale is 1 / sqrt(hidden / heads) instead of 1 / sqrt(head_dim): (architecture, layers).
_WIDE_QUERY_SCALE = {("gemma2", 46), ("gemma3", 62)}
_WINDOW_DEFAULT = {"gemma2": 4096}
_LOCAL_THETA = 10_000.0


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], source: str) -> ModelConfig:
    """Return the configuration of a GGUF file.

    metadata: its key/value pairs. tensors: name -> an object with `shape` (row-major) and `data()`; only shapes and the
    small rope tensors are read.
    Raises: UnsupportedError ``config.architecture``; ConfigError ``config.missing``, ``config.type``, ``config.value``.
    """
    arch = ConfigReader(metadata, source).str("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(
            f"{source}: general.architecture: expected one of {known}, got {arch!r}; convert a supported model",
            code="config.architecture",
        )
    read = _Keys(ConfigReader(metadata, source), arch)
    config = _sizes(read, tensors)
    config["rope_parameters"] = _rope(read, tensors, config)
    _window(read, config)
    if arch in ("gemma2", "gemma3"):
        _gemma(read, config)
    if config["model_type"] == "llama" and config.get("sliding_window"):
        config["model_type"] = "mistral"
    config["eos_token_id"] = _end_ids(metadata)
    for key in ("bos", "padding"):
        found = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if found is not None:
            config["pad_token_id" if key == "padding" else "bos_token_id"] = found
    if read.whole("expert_count", 0):
        raise UnsupportedError(
            f"{source}: {arch}.expert_count: expected 0, got {read.whole('expert_count')}; this build has no experts",
            code="config.unsupported",
        )
    read.raw("vocab_size")  # the embedding's rows are what counts
    # Under their own names, so that they are listed with what a family leaves unread.
    config.update({key: metadata[key] for key in read.reader.unread() if key.startswith(f"{arch}.")})
    generation: GenerationDefaults = generation_defaults(config, {}, source)
    return ModelConfig(config, generation, source, container="gguf")


class _Keys:
    """Access to ``{arch}.key``, arrays of equal entries read as one number."""

    def __init__(self, reader: ConfigReader, arch: str) -> None:
        self.reader = reader
        self.arch = arch

    def raw(self, key: str) -> Any:
        value = self.reader.get(f"{self.arch}.{key}", default=None)
        return value if value is None or isinstance(value, str | bool | int | float) else list(value)

    def number(self, key: str, default: Any = None) -> Any:
        value = self.raw(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedError(
                    f"{self.reader.name(f'{self.arch}.{key}')}: expected one value for all layers, got {value[:8]}; "
                    "this build has no layers of different sizes",
                    code="config.unsupported",
                )
            value = value[0]
        if value is None and default is not None:
            return default
        if value is None or isinstance(value, bool | str):
            code = "config.missing" if value is None else "config.type"
            raise ConfigError(
                f"{self.reader.name(f'{self.arch}.{key}')}: expected a number, got {value!r}; convert the model again",
                code=code,
            )
        return value

    def whole(self, key: str, default: int | None = None, most: int = MAX_INT) -> int:
        value = self.number(key, default)
        try:
            found = as_int(value)
        except (TypeError, ValueError, OverflowError):
            found = -1
        if not 0 <= found <= most:
            raise ConfigError(
                f"{self.reader.name(f'{self.arch}.{key}')}: expected an integer from 0 to {most}, got {value!r}; convert the "
                "model again",
                code="config.value",
            )
        return found

    def optional(self, key: str) -> Any:
        return None if self.raw(key) is None else self.number(key)


def _sizes(read: _Keys, tensors: Mapping[str, Any]) -> dict[str, Any]:
    heads = read.whole("attention.head_count")
    hidden = read.whole("embedding_length")
    if heads < 1 or hidden < 1:
        raise ConfigError(
            f"{read.reader.source}: expected head_count and embedding_length above 0, got {heads} and {hidden}; "
            "convert the model again",
            code="config.value",
        )
    head_dim = read.whole("attention.key_length", hidden // heads)
    value_dim = read.whole("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedError(
            f"{read.reader.source}: expected value_length equal to key_length {head_dim}, got {value_dim}; "
            "this build has one head size",
            code="config.unsupported",
        )
    embedding = tensors.get("token_embd.weight")
    vocab = int(embedding.shape[0]) if embedding is not None and len(embedding.shape) == 2 else read.whole("vocab_size")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[read.arch],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": read.whole("feed_forward_length"),
        "num_hidden_layers": read.whole("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": read.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(read.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": read.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if read.arch in ("llama", "mistral", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if read.arch == "phi3":
        most = config["max_position_embeddings"]
        config["original_max_position_embeddings"] = read.whole("rope.scaling.original_context_length", most)
    return config


def _rope(read: _Keys, tensors: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the HF-style rope object: scaling keys, or the divisors stored as tensors."""
    rope: dict[str, Any] = {"rope_theta": float(read.number("rope.freq_base", 10_000.0)), "rope_type": "default"}
    rotated = read.whole("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        # Half a dim more, so that the product with head_dim rounds down to `rotated` whatever the quotient rounds to.
        rope["partial_rotary_factor"] = (rotated + 0.5) / max(config["head_dim"], 1)
    kind = read.raw("rope.scaling.type")
    factor = read.optional("rope.scaling.factor")
    attention = read.optional("rope.scaling.attn_factor")
    original = read.optional("rope.scaling.original_context_length")
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise UnsupportedError(
            f"{read.reader.name(f'{read.arch}.rope.scaling.type')}: expected none, linear, yarn or longrope, "
            f"got {kind!r}; this build does not implement it",
            code="config.unsupported",
        )
    if "rope_factors_long.weight" in tensors:
        rope.update(
            rope_type="longrope",
            long_factor=_floats(tensors["rope_factors_long.weight"]),
            short_factor=_floats(tensors["rope_factors_short.weight"]),
        )
        if attention is not None:
            rope["attention_factor"] = float(attention)
    elif "rope_freqs.weight" in tensors:
        rope.update(rope_type="factors", factors=_floats(tensors["rope_freqs.weight"]))
    elif kind == "longrope":
        raise ConfigError(
            f"{read.reader.source}: expected tensors rope_factors_long and rope_factors_short, got none; "
            "convert the model again",
            code="config.missing",
        )
    elif kind == "linear":
        rope.update(rope_type="linear", factor=float(factor or 1.0))
    elif kind == "yarn":
        factor = float(factor or 1.0)
        rope.update(rope_type="yarn", factor=factor)
        if attention not in (None, 1.0):
            rope["attention_factor"] = float(attention) * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        for name in ("beta_fast", "beta_slow"):
            found = read.optional(f"rope.scaling.yarn_{name}")
            if found is not None:
                rope[name] = float(found)
    if original is not None and rope["rope_type"] in ("yarn", "longrope"):
        rope["original_max_position_embeddings"] = read.whole("rope.scaling.original_context_length")
    return rope


def _window(read: _Keys, config: dict[str, Any]) -> None:
    """Fill in the sliding window and which layers have it."""
    window = read.optional("attention.sliding_window")
    if window is None:
        window = _WINDOW_DEFAULT.get(read.arch)
    if not window:
        if read.arch in ("gemma2", "gemma3", "mistral"):  # an absent key would mean their class's default
            config["sliding_window"] = None
        if read.arch in ("gemma2", "gemma3"):
            config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
        return
    config["sliding_window"] = window
    layers = config["num_hidden_layers"]
    pattern = read.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        kinds = [bool(x) for x in pattern]
    elif read.arch in ("gemma2", "gemma3"):
        period = pattern if isinstance(pattern, int) and pattern > 0 else 2 if read.arch == "gemma2" else 6
        kinds = [bool((i + 1) % period) for i in range(layers)]
    elif read.arch in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False  # llama.cpp has none for these
        return
    else:
        return
    config["layer_types"] = ["sliding_attention" if k else "full_attention" for k in kinds]


def _gemma(read: _Keys, config: dict[str, Any]) -> None:
    """Fill in Gemma's caps, query scale and second rope."""
    heads, hidden, head_dim = config["num_attention_heads"], config["hidden_size"], config["head_dim"]
    scale = read.optional("attention.scale")
    wide = (read.arch, config["num_hidden_layers"]) in _WIDE_QUERY_SCALE
    config["query_pre_attn_scalar"] = scale**-2.0 if scale else hidden / heads if wide else head_dim
    if read.arch == "gemma2":
        config["attn_logit_softcapping"] = float(read.number("attn_logit_softcapping", 50.0))
        config["final_logit_softcapping"] = float(read.number("final_logit_softcapping", 30.0))
    else:
        config["final_logit_softcapping"] = read.optional("final_logit_softcapping")
        local = {"rope_type": "default", "rope_theta": float(read.number("rope.freq_base_swa", _LOCAL_THETA))}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _floats(tensor: Any) -> list[float]:
    """Return a float32 vector tensor's values."""
    if tensor.format != "f32":
        raise UnsupportedError(
            f"{tensor.name}: expected format f32, got {tensor.format}; convert the model again", code="config.unsupported"
        )
    return [float(x) for x in tensor.data().reshape(-1)]


def _end_ids(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the end-of-text and end-of-turn ids."""
    names = ("eos", "eot")
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return [i for i in found if i is not None]
