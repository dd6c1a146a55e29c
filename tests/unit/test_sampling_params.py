"""The validators of sampling parameters and engine options: every contradiction, one sentence and one code each."""

from __future__ import annotations

from typing import Any

import pytest

from metrale.config.engine import EngineConfig
from metrale.config.files import GenerationDefaults
from metrale.config.sampling import SamplingParams
from metrale.errors import ConfigError, RequestError

NAN = float("nan")


def test_defaults_are_valid() -> None:
    assert SamplingParams().validate(vocab=10, max_context=5) == SamplingParams()
    assert EngineConfig().validate() == EngineConfig()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"logit_bias": {5: NAN}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {i: 1.0 for i in range(99)}, "bad_token_ids": [99] * 202}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"bad_token_ids": [100]}, "bad_token_ids"),
        ({"bad_token_ids": [7], "logit_bias": {7: 1.0}}, "bad_token_ids"),
        ({"bad_token_ids": [7], "stop_token_ids": [7]}, "bad_token_ids"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
    ],
)
def test_contradictions_have_a_code_and_a_sentence(values: dict[str, Any], field: str) -> None:
    problems = SamplingParams(**values).problems(vocab=100, max_context=64)
    assert [p.code for p in problems] == [f"sampling.{field}"]
    text = str(problems[0])
    assert text.startswith(f"{field}: expected ")
    assert ", got " in text
    assert ";" in text


def test_all_contradictions_are_listed_at_once() -> None:
    with pytest.raises(RequestError, match=r"temperature: .*; top_p: .*; n: ") as error:
        SamplingParams(temperature=-1, top_p=2, n=0).validate()
    assert error.value.code == "sampling.temperature"
    assert isinstance(error.value, ValueError)


def test_sequences_become_tuples() -> None:
    p = SamplingParams(stop="end", stop_token_ids=[1, 2], bad_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert (p.stop, p.stop_token_ids, p.bad_token_ids, p.logit_bias) == (("end",), (1, 2), (), {})


def test_a_checkpoints_defaults_give_way_to_what_is_asked() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95)
    p = SamplingParams.from_generation(defaults, top_p=0.5, seed=None, max_tokens=7)
    assert (p.temperature, p.top_k, p.top_p, p.max_tokens) == (0.6, 20, 0.5, 7)
    assert SamplingParams.from_generation(GenerationDefaults(do_sample=False, temperature=0.7)).greedy
    assert not SamplingParams.from_generation(GenerationDefaults(do_sample=False), temperature=0.3).greedy


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"device": "tpu"}, "device"),
        ({"activations": "int4"}, "activations"),
        ({"threads": -1}, "threads"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_context": 0}, "max_context"),
        ({"kv_blocks": 1}, "kv_blocks"),
        ({"kv_blocks": 9, "kv_memory_bytes": 9}, "kv_blocks"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"graphs": 1}, "graphs"),
        ({"seed": -1}, "seed"),
        ({"result_depth": 0}, "result_depth"),
        ({"chunk_tokens": "512"}, "chunk_tokens"),
    ],
)
def test_engine_contradictions(values: dict[str, Any], field: str) -> None:
    config = EngineConfig(**values)
    assert [p.code for p in config.problems()] == [f"engine.{field}"]
    with pytest.raises(ConfigError, match=f"{field}: expected .*, got .*; "):
        config.validate()
