"""Damaged and unsupported checkpoints through `LLM`: class, code and sentence, nothing left open, then a good one opens."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metrale import LLM, SamplingParams
from metrale.errors import ConfigError, DeviceError, MetraleError, UnsupportedError, WeightError
from tests.engine.tiny_checkpoint import END, tensors, write
from tests.hostile.refusal import LFS

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 2, "max_rows": 3, "kv_blocks": 14}


def edit(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a damage: a JSON file, changed."""

    def damage(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return damage


def config(**keys: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda value: value.update(keys))


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep]) and None


SHARD = "model-00002-of-00002.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], None], type[MetraleError], str]] = {
    "missing-shard": (remove(SHARD), WeightError, SHARD),
    "lfs-pointer": (replace(SHARD, LFS), WeightError, "LFS"),
    "empty-shard": (replace(SHARD, b""), WeightError, SHARD),
    "truncated-header": (cut(SHARD, 100), WeightError, SHARD),
    "truncated-data": (cut(SHARD, 5000), WeightError, SHARD),
    "no-index-no-shards": (lambda folder: [p.unlink() for p in folder.glob("model*")] and None, WeightError, ""),
    "index-not-json": (replace("model.safetensors.index.json", b"{"), WeightError, "index.json"),
    "no-config": (remove("config.json"), ConfigError, "config.json"),
    "config-not-json": (replace("config.json", b"not json"), ConfigError, "config.json"),
    "config-a-list": (replace("config.json", b"[]"), ConfigError, "config.json"),
    "hidden-size": (config(hidden_size=40), WeightError, "shape"),
    "vocab-size": (config(vocab_size=300), WeightError, "300"),
    "more-layers": (config(num_hidden_layers=3), WeightError, "layers.2"),
    "fewer-layers": (config(num_hidden_layers=1), WeightError, "layers.1"),
    "negative-heads": (config(num_attention_heads=-4), ConfigError, "-4"),
    "heads-a-word": (config(num_attention_heads="four"), ConfigError, "four"),
    "unknown-architecture": (config(model_type="nosuch", architectures=["NoSuchForCausalLM"]), UnsupportedError, "nosuch"),
    "unknown-activation": (config(hidden_act="nosuch"), UnsupportedError, "nosuch"),
    "quantization": (config(quantization_config={"quant_method": "gptq", "bits": 4}), UnsupportedError, "gptq"),
    "rope-type": (config(rope_parameters={"rope_type": "nosuch", "rope_theta": 1e4}), UnsupportedError, "nosuch"),
    "tokenizer-not-json": (replace("tokenizer.json", b"{"), ConfigError, "tokenizer.json"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("damage") / "whole", shards=2)


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints(whole: Path, tmp_path: Path, name: str) -> None:
    damage, kind, sentence = DAMAGES[name]
    folder = tmp_path / "broken"
    shutil.copytree(whole, folder)
    damage(folder)
    threads = threading.active_count()
    with pytest.raises(MetraleError) as caught:
        LLM(folder, **OPTIONS)
    message = str(caught.value)
    assert type(caught.value) is kind, f"{type(caught.value).__name__} {caught.value.code}: {message}"
    assert "." in caught.value.code
    assert all(part in message for part in (": expected ", ", got", "; ", sentence)), message
    assert "\n" not in message
    assert threading.active_count() == threads
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_the_whole_one_opens_afterwards(whole: Path) -> None:
    with LLM(whole, **OPTIONS) as llm:
        assert len(llm.generate("abc", temperature=1.0, max_tokens=4, ignore_eos=True).token_ids) == 4


def test_an_unread_key_is_no_damage(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "more")
    config(my_own_note="x", torch_dtype="float32", transformers_version="9.9")(tmp_path / "more")
    LLM(tmp_path / "more", **OPTIONS).close()


@pytest.mark.parametrize("bad", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_nan_weights_end_the_request(tmp_path: Path, bad: str) -> None:
    weights = tensors()
    weights[bad].flat[7] = np.nan
    weights[bad].flat[3] = np.inf
    with LLM(write(tmp_path / "nan", weights=weights), **OPTIONS) as llm:
        for params in (
            SamplingParams(temperature=0, max_tokens=5),
            SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1),
            SamplingParams(temperature=1.0, seed=1, top_p=0.9, top_k=5, max_tokens=5, n=2),
        ):
            with pytest.raises(DeviceError, match="metrale inspect --nan") as caught:
                llm.generate("abc", params)
            assert caught.value.code == "device.not_finite"
        assert llm.model.live_sequences() == ()


def test_nan_in_mid_answer_ends_its_request_alone(tmp_path: Path) -> None:
    """One token's embedding is damaged: who never meets it goes on."""
    weights = tensors()
    with LLM(write(tmp_path / "whole", weights=weights), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        first, other = llm.generate("abc", params).token_ids, llm.generate("xyz", params).token_ids
    bad = next(t for t in first if t not in (*other, *b"abcxyz"))
    weights["model.embed_tokens.weight"][bad] = np.nan
    with LLM(write(tmp_path / "nan", weights=weights), **OPTIONS) as llm:
        one, two = (llm._engine.submit(llm.tokenizer.encode(text), params) for text in ("abc", "xyz"))
        llm._engine.run([one, two])
        assert isinstance(one.error, DeviceError)
        assert one.error.code == "device.not_finite"
        assert one.choices[0].output == list(first[: first.index(bad) + 1])
        assert two.error is None
        assert two.choices[0].output == list(other)


def test_one_nan_logit_is_never_chosen(tmp_path: Path) -> None:
    weights = tensors()
    weights["lm_head.weight"].flat[7] = np.nan
    with LLM(write(tmp_path / "nan", weights=weights), **OPTIONS) as llm:
        for params in (
            SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1),
            SamplingParams(temperature=1.0, seed=1, top_p=0.9, top_k=5, max_tokens=5, n=2),
        ):
            result = llm.generate("abc", params)
            assert all(0 < i <= END + 2 for c in result.completions for i in c.token_ids)
        assert llm.model.live_sequences() == ()
