"""config.json and generation_config.json, and GGUF metadata turned into the same form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale.config.files import load_config
from metrale.config.gguf import config_from_gguf
from metrale.errors import ConfigError, UnsupportedError
from metrale.families import resolve


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_end_ids_are_joined_and_the_generation_config_wins(tmp_path: Path) -> None:
    config = {"eos_token_id": 5, "bos_token_id": 1, "text_config": {"eos_token_id": [7, 5]}, "temperature": 1.5}
    generation = {"eos_token_id": [5, 9], "temperature": 0.6, "top_k": 20, "do_sample": True, "pad_token_id": [3, 4]}
    found = load_config(write(tmp_path, config, generation)).generation
    assert found.eos_ids == (5, 7, 9)
    assert (found.bos_id, found.pad_id, found.temperature, found.top_k, found.top_p, found.do_sample) == (
        1,
        3,
        0.6,
        20,
        None,
        True,
    )


def test_no_end_id_is_no_error(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, {"eos_token_id": None})).generation.eos_ids == ()
    assert load_config(write(tmp_path, {"eos_token_id": -1})).generation.eos_ids == ()


@pytest.mark.parametrize(
    ("config", "generation", "code"),
    [
        ("{", None, "config.json"),
        ("[1]", None, "config.json"),
        ("\udcff", None, "config.json"),
        ("[" * 100_000, None, "config.json"),
        ({"eos_token_id": "5"}, None, "config.type"),
        ({}, {"temperature": "hot"}, "config.type"),
        ({}, {"top_k": 1.5}, "config.type"),
    ],
)
def test_damaged_files_are_refused(config: Any, generation: Any, code: str, tmp_path: Path) -> None:
    if config == "\udcff":
        (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    else:
        write(tmp_path, config, generation)
    with pytest.raises(ConfigError, match=r"config.json.*: expected .*, got .*; ") as error:
        load_config(tmp_path)
    assert error.value.code == code


def test_the_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    for key, value in (("temperature", "hot"), ("eos_token_id", "x"), ("pad_token_id", 0.5)):
        write(tmp_path, {"top_k": 5}, {key: value})
        with pytest.raises(ConfigError, match=rf"generation_config\.json: {key}: expected "):
            load_config(tmp_path)
        write(tmp_path, {key: value}, {"top_k": 5})
        with pytest.raises(ConfigError, match=rf"[^_]config\.json: {key}: expected "):
            load_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json: expected a config file, got nothing; fetch it") as error:
        load_config(tmp_path)
    assert error.value.code == "config.not_found"


class Stored:
    """What the GGUF reader knows of a tensor, as far as a config needs it."""

    name, format = "t", "f32"

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def metadata(arch: str, **changes: Any) -> dict[str, Any]:
    found = {
        "general.architecture": arch,
        f"{arch}.context_length": 640,
        f"{arch}.embedding_length": 48,
        f"{arch}.block_count": 12,
        f"{arch}.feed_forward_length": 70,
        f"{arch}.attention.head_count": 6,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.eot_token_id": 6,
        "tokenizer.ggml.bos_token_id": 1,
    }
    found.update({key if key.startswith("general.") else f"{arch}.{key}": value for key, value in changes.items()})
    return {key: value for key, value in found.items() if value is not None}


TENSORS = {"token_embd.weight": Stored(98, 48), "output.weight": Stored(98, 48)}


def spec(arch: str, tensors: dict[str, Any] | None = None, **changes: Any) -> Any:
    config = config_from_gguf(metadata(arch, **changes), TENSORS if tensors is None else tensors, "m.gguf")
    assert config.container == "gguf"
    found = resolve(config.mapping, config.source)
    assert found.unread == ()
    return found.spec


def test_gguf_sizes_and_end_ids() -> None:
    config = config_from_gguf(metadata("llama"), TENSORS, "m.gguf")
    assert config.generation.eos_ids == (4, 6)
    assert config.generation.bos_id == 1
    s = spec("llama")
    a = s.layers[0].attention
    assert (s.family, s.vocab, s.hidden, a.heads, a.kv_heads, a.head_dim, s.tied, s.max_context) == (
        "llama",
        98,
        48,
        6,
        2,
        8,
        False,
        640,
    )
    assert spec("llama", {"token_embd.weight": Stored(98, 48)}).tied
    assert spec("qwen3", **{"attention.key_length": 20, "attention.value_length": 20}).layers[0].attention.head_dim == 20


def test_gguf_keys_that_nothing_reads_are_listed() -> None:
    changes = {"logit_scale": 0.5, "attention.causal": True, "expert_count": 0, "vocab_size": 98}
    config = config_from_gguf(metadata("llama", **changes), TENSORS, "m.gguf")
    assert resolve(config.mapping, config.source).unread == ("llama.attention.causal", "llama.logit_scale")


def test_gguf_gemma_conventions() -> None:
    s = spec("gemma3", **{"attention.sliding_window": 32, "rope.freq_base": 1e6, "attention.key_length": 16})
    windows = [layer.attention.window for layer in s.layers]
    assert windows == ([32] * 5 + [None]) * 2
    local, whole = s.layers[0].attention, s.layers[5].attention
    assert (local.rope.theta, whole.rope.theta, local.scale) == (10_000.0, 1e6, 16**-0.5)
    s = spec("gemma2", **{"attention.key_length": 16, "block_count": 46})
    assert [layer.attention.window for layer in s.layers[:4]] == [4096, None, 4096, None]
    assert (s.layers[0].attention.softcap, s.logit_softcap, s.layers[0].attention.scale) == (50.0, 30.0, 8**-0.5)


@pytest.mark.parametrize(
    ("arch", "window"), [("gemma3", None), ("gemma3", 0), ("gemma2", 0), ("mistral", None), ("llama", None)]
)
def test_gguf_without_a_window_has_none(arch: str, window: int | None) -> None:
    assert {layer.attention.window for layer in spec(arch, **{"attention.sliding_window": window}).layers} == {None}


def test_gguf_sliding_llama_is_mistral() -> None:
    s = spec("llama", **{"attention.sliding_window": 32})
    assert s.family == "mistral"
    assert {layer.attention.window for layer in s.layers} == {32}


def test_gguf_rope_scaling() -> None:
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 160,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    rope = spec("qwen2", **scaling).layers[0].attention.rope
    assert (rope.kind, rope.factor, rope.original, rope.beta_fast, rope.beta_slow) == ("yarn", 4.0, 160, 16.0, 1.0)
    rope = spec("llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}).layers[0].attention.rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)
    rope = spec("llama", **{"rope.scaling.type": "none"}).layers[0].attention.rope
    assert rope.kind == "default"


@pytest.mark.parametrize(
    ("arch", "change", "kind", "code"),
    [
        ("mamba", {}, UnsupportedError, "config.architecture"),
        ("llama", {"block_count": None}, ConfigError, "config.missing"),
        ("llama", {"block_count": "12"}, ConfigError, "config.type"),
        ("llama", {"feed_forward_length": [70, 80]}, UnsupportedError, "config.unsupported"),
        ("llama", {"attention.value_length": 20}, UnsupportedError, "config.unsupported"),
        ("llama", {"rope.scaling.type": "spiral"}, UnsupportedError, "config.unsupported"),
        ("llama", {"expert_count": 8}, UnsupportedError, "config.unsupported"),
        ("phi3", {"rope.scaling.type": "longrope"}, ConfigError, "config.missing"),
        ("llama", {"attention.head_count": 0}, ConfigError, "config.value"),
        ("llama", {"general.architecture": None}, ConfigError, "config.missing"),
    ],
)
def test_gguf_metadata_that_is_refused(arch: str, change: dict[str, Any], kind: type[Exception], code: str) -> None:
    with pytest.raises(kind, match=r"m.gguf: .*expected .*, got .*; ") as error:
        spec(arch, **change)
    assert error.value.code == code  # type: ignore[attr-defined]
