"""`LLM` over a tiny checkpoint: what goes in, what comes out, and what is refused with class, code and sentence."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metrale import LLM, SamplingParams
from metrale.config.engine import EngineConfig
from metrale.errors import CapacityError, ConfigError, MetraleError, RequestError
from tests.engine.tiny_checkpoint import CONTEXT, END, VOCAB, write

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 2, "max_rows": 4, "kv_blocks": 25, "chunk_tokens": 16}
SAMPLED = SamplingParams(temperature=0.8, seed=4, max_tokens=7, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("api") / "tiny", shards=3)


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(opened: LLM) -> Iterator[LLM]:
    """The shared engine; every test must leave it empty and usable."""
    blocks, rows = opened.model.free_blocks, opened.model.free_rows
    yield opened
    assert opened.model.live_sequences() == ()
    assert (opened.model.free_blocks, opened.model.free_rows) == (blocks, rows)
    assert len(opened.generate("still here", SAMPLED).token_ids) == 7


def refuses(kind: type[MetraleError], code: str, sentence: str) -> Any:
    """Expect an error of exactly this class and code, in the form *subject: expected, got; remedy*."""

    class Check:
        def __enter__(self) -> None:
            self.raises = pytest.raises(MetraleError)
            self.info = self.raises.__enter__()

        def __exit__(self, *exc: Any) -> bool:
            caught = bool(self.raises.__exit__(*exc))
            message = str(self.info.value)
            assert type(self.info.value) is kind, message
            assert self.info.value.code == code, message
            assert all(part in message for part in (": expected ", ", got ", "; ", sentence)), message
            assert "\n" not in message
            return caught

    return Check()


# --- opening and closing ---


def test_open_close_and_closed_use(folder: Path) -> None:
    with LLM(folder, **OPTIONS) as llm:
        assert llm.path == folder
        assert llm.config.chunk_tokens == 16
        before = llm.stream("abc", SAMPLED)
        running = llm.stream("abc", SAMPLED)
        next(running)
    llm.close()
    assert [d.finish_reason for d in running][-1] == "cancelled"
    ask = [{"role": "user", "content": "a"}]
    for use in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: next(before), lambda: llm.chat(ask)):
        with refuses(RequestError, "engine.closed", "open it again"):
            use()


def test_two_engines_in_one_process(folder: Path, opened: LLM) -> None:
    with LLM(folder, config=EngineConfig(device="reference", max_rows=2, kv_blocks=12), chunk_tokens=8) as other:
        assert other.config.device == "reference"
        greedy = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
        first = opened.stream("abcdefghijkl", **greedy)
        next(first)
        assert other.generate("abcdefghijkl", **greedy).token_ids == opened.generate("abcdefghijkl", **greedy).token_ids
        assert len(list(first)) >= 1


def test_progress_of_loading(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    LLM(folder, progress=lambda done, total: seen.append((done, total)), **OPTIONS).close()
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_failing_progress_callback_leaves_nothing_open(folder: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        LLM(folder, progress=interrupt, **OPTIONS)
    gc.collect()
    assert threading.active_count() == threads
    assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ({"thread": 2}, "engine.unknown", "thread"),
        ({"device": "tpu"}, "engine.device", "'tpu'"),
        ({"threads": -1}, "engine.threads", "-1"),
        ({"activations": "int4"}, "engine.activations", "'int4'"),
        ({"max_context": 0}, "engine.max_context", "0"),
        ({"kv_blocks": 9, "kv_memory_bytes": 1 << 20}, "engine.kv_blocks", "both"),
    ],
)
def test_options(folder: Path, options: dict[str, Any], code: str, sentence: str) -> None:
    with refuses(ConfigError, code, sentence):
        LLM(folder, **options)


def test_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_THREAD", "2")
    with refuses(ConfigError, "env.unknown", "did you mean METRALE_THREADS?"):
        LLM(folder)
    monkeypatch.delenv("METRALE_THREAD")
    monkeypatch.setenv("METRALE_TRACE", "loud")
    with refuses(ConfigError, "env.value", "'loud'"):
        LLM(folder)


@pytest.mark.parametrize("name", ["no-such-model", "org/no-such-model", "x" * 5000, "~nobody-here/model", "a\0b"])
def test_unknown_models(name: str) -> None:
    with refuses(ConfigError, "model.not_found", ""):
        LLM(name)


@pytest.mark.parametrize("name", [None, 5, b"bytes"])
def test_models_of_wrong_type(name: Any) -> None:
    with refuses(ConfigError, "model.not_found", type(name).__name__):
        LLM(name)


# --- prompts ---


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize(
    ("prompt", "code", "sentence"),
    [
        ("", "prompt.empty", "got none"),
        ([], "prompt.empty", "got none"),
        (None, "prompt.type", "NoneType"),
        (5, "prompt.type", "int"),
        (b"bytes", "prompt.type", "bytes"),
        ({"role": "user"}, "prompt.type", "dict"),
        ([1, 2.5], "prompt.type", "2.5"),
        ([1, True], "prompt.type", "True"),
        ([1, "a"], "prompt.type", "'a'"),
        ("a lone \udc80 surrogate", "prompt.text", ""),
        ([1, VOCAB], "prompt.token", str(VOCAB)),
        ([-1], "prompt.token", "-1"),
        ([10**30], "prompt.token", ""),
        ("x" * CONTEXT, "prompt.length", f"got {CONTEXT}"),
        ("x" * 5000, "prompt.length", "got 5000"),
    ],
)
def test_bad_prompts(llm: LLM, call: str, prompt: Any, code: str, sentence: str) -> None:
    with refuses(RequestError, code, sentence):
        getattr(llm, call)(prompt, max_tokens=3)


def test_one_bad_prompt_of_many_starts_none(llm: LLM) -> None:
    steps = llm.model.stats.prefill_chunks
    for prompts, code in (
        (["good", ""], "prompt.empty"),
        (["good", 5], "prompt.type"),
        ([[1], [VOCAB]], "prompt.token"),
        (["good", "x" * CONTEXT], "prompt.length"),
    ):
        with refuses(RequestError, code, ""):
            llm.generate(prompts, SAMPLED)
    assert llm.model.stats.prefill_chunks == steps


def test_stream_takes_one_prompt(llm: LLM) -> None:
    with refuses(RequestError, "prompt.type", "a list of 2"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]


def test_longest_prompt(llm: LLM) -> None:
    result = llm.generate("x" * (CONTEXT - 1), SAMPLED)
    assert (len(result.token_ids), result.finish_reason) == (1, "length")
    full = llm.generate("x" * 40, SAMPLED, max_tokens=None)
    assert (len(full.token_ids), full.finish_reason) == (CONTEXT - 40, "length")


def test_a_pool_that_cannot_hold_one_context(folder: Path) -> None:
    with refuses(CapacityError, "capacity.memory", "at most 32 tokens"):
        LLM(folder, **{**OPTIONS, "kv_blocks": 3})
    with LLM(folder, **{**OPTIONS, "kv_blocks": 3}, max_context=32) as llm:
        assert len(llm.generate("fits", SAMPLED).token_ids) == 7


def test_a_context_that_nobody_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It shrinks to what fits and says so; below the shortest useful one the sentence tells where its length is from."""
    long = write(tmp_path / "long", config={"max_position_embeddings": 4096})
    with LLM(long, **{**OPTIONS, "kv_blocks": 40}) as llm:
        assert llm.model.limits.context_tokens == 546
    assert [r.levelname for r in caplog.records if "546 tokens of the model's 4096" in r.message] == ["WARNING"]
    with refuses(CapacityError, "capacity.memory", "one context of 512 tokens, the shortest that is chosen when max_context"):
        LLM(long, **{**OPTIONS, "kv_blocks": 8})
    with refuses(CapacityError, "capacity.memory", "one context of 20 tokens (2 blocks"):
        LLM(long, **{**OPTIONS, "kv_blocks": 2}, max_context=20)
    caplog.clear()
    LLM(long, **{**OPTIONS, "kv_blocks": 40}, max_context=600).close()
    assert not caplog.records


def test_text_ids_and_numpy_ids_are_the_same(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the same")
    want = llm.generate("the same", SAMPLED).token_ids
    for prompt in (ids, tuple(ids), [np.int64(i) for i in ids], np.array(ids).tolist()):
        assert llm.generate(prompt, SAMPLED).token_ids == want


def test_many_prompts_with_their_own_parameters(llm: LLM) -> None:
    prompts = [f"prompt {'x' * i}" for i in range(23)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=1 + i % 9, ignore_eos=True) for i in range(23)]
    together = llm.generate(prompts, params)
    assert [len(r.token_ids) for r in together] == [1 + i % 9 for i in range(23)]
    for prompt, param, result in list(zip(prompts, params, together, strict=True))[::4]:
        assert llm.generate(prompt, param).completions == result.completions
    longer = llm.generate(prompts[:2], params[:2], max_tokens=11)
    assert [len(r.token_ids) for r in longer] == [11, 11]


def test_a_crowded_pool_changes_no_text(folder: Path, opened: LLM) -> None:
    prompts = [f"{i}: {'y' * (5 * i)}" for i in range(6)]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=40, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    with LLM(folder, **{**OPTIONS, "kv_blocks": 8}) as small:
        crowded = small.generate(prompts, params)
        assert small.model.live_sequences() == ()
    for got, want in zip(crowded, opened.generate(prompts, params), strict=True):
        assert (got.completions, got.prompt_logprobs) == (want.completions, want.prompt_logprobs)


# --- parameters ---


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        ({"temprature": 1.0}, "sampling.unknown", "temprature"),
        ({"temperature": -1}, "sampling.temperature", "-1"),
        ({"temperature": float("nan")}, "sampling.temperature", "nan"),
        ({"top_p": 0}, "sampling.top_p", "0"),
        ({"top_k": -3}, "sampling.top_k", "-3"),
        ({"top_k": 2**31}, "sampling.top_k", str(2**30)),
        ({"min_tokens": 2**31}, "sampling.min_tokens", str(2**30)),
        ({"min_p": 2}, "sampling.min_p", "2"),
        ({"max_tokens": 0}, "sampling.max_tokens", "0"),
        ({"max_tokens": CONTEXT + 1}, "sampling.max_tokens", str(CONTEXT)),
        ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens", "4"),
        ({"n": 2, "temperature": 0}, "sampling.n", "temperature"),
        ({"n": 0}, "sampling.n", "0"),
        ({"seed": -1}, "sampling.seed", "-1"),
        ({"seed": 2**64}, "sampling.seed", "2^64"),
        ({"stop": ""}, "sampling.stop", "empty"),
        ({"stop": [5]}, "sampling.stop", "5"),
        ({"stop": "\udc80"}, "sampling.stop", "surrogate"),
        ({"stop_token_ids": [VOCAB]}, "sampling.stop_token_ids", str(VOCAB)),
        ({"bad_token_ids": [3], "stop_token_ids": [3]}, "sampling.bad_token_ids", "3"),
        ({"bad_token_ids": [3], "logit_bias": {3: 1.0}}, "sampling.bad_token_ids", "3"),
        ({"logit_bias": {3: 1000}}, "sampling.logit_bias", "1000"),
        ({"logit_bias": {"3": 1}}, "sampling.logit_bias", "'3'"),
        ({"logit_bias": 5}, "sampling.logit_bias", "5"),
        ({"min_tokens": 1, "stop_token_ids": range(250), "logit_bias": dict.fromkeys(range(80), 1)}, "sampling.logit_bias", ""),
        ({"logprobs": 21}, "sampling.logprobs", "20"),
        ({"prompt_logprobs": -1}, "sampling.prompt_logprobs", "-1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)  # fmt: skip
def test_contradictory_parameters(llm: LLM, fields: dict[str, Any], code: str, sentence: str) -> None:
    for call in (llm.generate, llm.stream):
        with refuses(RequestError, code, sentence):
            call("abc", **fields)


@pytest.mark.parametrize("params", [[SAMPLED], [SAMPLED] * 3, 5, {"temperature": 1}, [SAMPLED, None], "greedy"])
def test_parameters_of_wrong_count_or_type(llm: LLM, params: Any) -> None:
    with refuses(RequestError, "sampling.count", "2 prompts"):
        llm.generate(["a", "b"], params)


def test_several_problems_are_told_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate("abc", temperature=-1, top_p=7)
    assert "temperature: expected" in str(caught.value)
    assert "top_p: expected" in str(caught.value)


def test_the_engines_seed_serves_requests_without_one(folder: Path) -> None:
    with LLM(folder, seed=9, **OPTIONS) as llm:
        results = [llm.generate("abc", temperature=1, max_tokens=6) for _ in range(2)]
        assert [r.seed for r in results] == [9, 9]
        assert results[0].token_ids == results[1].token_ids
        assert llm.generate("abc", seed=3, max_tokens=2).seed == 3


# --- chat ---


@pytest.mark.parametrize(
    ("messages", "code"),
    [([], "chat.messages"), ("hi", "chat.messages"), ([{"content": "no role"}], "chat.messages"), ([5], "chat.messages")],
)
def test_bad_messages(llm: LLM, messages: Any, code: str) -> None:
    with refuses(RequestError, code, ""):
        llm.chat(messages)


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    result = llm.chat(messages, SAMPLED)
    assert result.prompt_token_ids[0] == END + 1
    assert [d.result for d in llm.chat(messages, SAMPLED, stream=True)][-1].completions == result.completions


def test_checkpoint_without_tokenizer(tmp_path: Path) -> None:
    with LLM(write(tmp_path / "ids", tokenizer=False), **OPTIONS) as llm:
        result = llm.generate([5, 6, 7], SAMPLED)
        assert (len(result.token_ids), result.text) == (7, "")
        for use in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "a"}]), lambda: llm.tokenizer):
            with refuses(RequestError, "tokenizer.missing", "tokenizer.json"):
                use()
        with refuses(RequestError, "sampling.stop", "stop_token_ids"):
            llm.generate([5], stop="a")
