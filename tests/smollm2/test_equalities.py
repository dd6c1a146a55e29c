"""One text, however it is asked for: batches, chunks, threads, graphs, streams. Bit for bit on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metrale import LLM, SamplingParams
from tests.smollm2.prompts import PROMPTS

pytestmark = pytest.mark.model

FIVE = [PROMPTS[i].text for i in (5, 9, 13, 16, 19)]
LONG = next(p.text for p in PROMPTS if p.kind == "prose-long")
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=11, max_tokens=12, logprobs=2, ignore_eos=True)


def plain(result: Any) -> Any:
    """Return what may not differ: all but the timings."""
    return result.prompt_token_ids, result.completions, result.usage, result.seed, result.prompt_logprobs


@pytest.fixture(scope="module")
def one_by_one(llm: LLM) -> list[Any]:
    """Each of the five prompts answered alone, and the long one."""
    return [plain(llm.generate(text, SAMPLED)) for text in [*FIVE, LONG]]


def test_batch_of_five(llm: LLM, one_by_one: list[Any]) -> None:
    assert [plain(r) for r in llm.generate(FIVE, SAMPLED)] == one_by_one[:5]
    backwards = llm.generate([LONG, *FIVE[::-1]], SAMPLED)
    assert [plain(r) for r in backwards[::-1]] == one_by_one


@pytest.mark.parametrize(
    "options",
    [{"chunk_tokens": 16}, {"chunk_tokens": 33, "threads": 1}, {"graphs": False}, {"threads": 1, "max_rows": 3}],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_chunks_threads_and_graphs(smollm2_path: Path, one_by_one: list[Any], options: dict[str, Any]) -> None:
    with LLM(smollm2_path, **{"device": "cpu", "threads": 2, "max_context": 512, **options}) as other:
        assert [plain(r) for r in other.generate([*FIVE, LONG], SAMPLED)] == one_by_one
        assert other.model.live_sequences() == ()


def test_stream_says_what_generate_says(llm: LLM, one_by_one: list[Any]) -> None:
    deltas = list(llm.stream(LONG, SAMPLED))
    result = deltas[-1].result
    assert result is not None
    assert plain(result) == one_by_one[5]
    assert all(delta.result is None for delta in deltas[:-1])
    assert "".join(delta.text for delta in deltas) == result.text
    assert tuple(i for delta in deltas for i in delta.token_ids) == result.token_ids
    assert tuple(p for delta in deltas for p in delta.logprobs or ()) == result.logprobs
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_two_streams_side_by_side(llm: LLM, one_by_one: list[Any]) -> None:
    first, second = llm.stream(FIVE[0], SAMPLED), llm.stream(FIVE[1], SAMPLED)
    pieces: list[list[str]] = [[], []]
    open_streams = {0: first, 1: second}
    while open_streams:
        for number, stream in list(open_streams.items()):
            delta = next(stream, None)
            if delta is None:
                del open_streams[number]
            else:
                pieces[number].append(delta.text)
    assert ["".join(p) for p in pieces] == [one_by_one[i][1][0].text for i in (0, 1)]
    assert llm.model.live_sequences() == ()


def test_choices_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=4, max_tokens=8, ignore_eos=True)
    answer = llm.generate(PROMPTS[5].text, params)
    assert [c.index for c in answer.completions] == [0, 1, 2, 3]
    assert len({c.token_ids for c in answer.completions}) == 4
    assert answer.usage.completion_tokens == 32
    crowd = llm.generate([FIVE[3], PROMPTS[5].text, FIVE[1]], [SAMPLED, params, SAMPLED])
    assert crowd[1].completions == answer.completions
    alone = llm.generate(PROMPTS[5].text, params, n=1)
    assert alone.completions[0] == answer.completions[0]


def test_a_drawn_seed_is_reported_and_repeats(llm: LLM) -> None:
    first = llm.generate(FIVE[0], temperature=1.0, max_tokens=8, ignore_eos=True)
    second = llm.generate(FIVE[0], temperature=1.0, max_tokens=8, ignore_eos=True)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    again = llm.generate(FIVE[0], temperature=1.0, max_tokens=8, ignore_eos=True, seed=first.seed)
    assert plain(again) == plain(first)


def test_prompt_logprobs_are_the_log_softmax_of_the_scores(llm: LLM) -> None:
    ids = llm.tokenizer.encode(LONG)[:70]
    result = llm.generate(ids, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=3, ignore_eos=True))
    logits = llm.model.score([*ids, *result.token_ids]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(ids)
    for index, entry in enumerate(result.prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.token_id == ids[index]
        assert entry.logprob == pytest.approx(logp[index - 1, ids[index]], abs=1e-5)
        best = np.argsort(-logp[index - 1], kind="stable")[:2]
        assert [i for i, _ in entry.top] == best.tolist()
        assert [p for _, p in entry.top] == pytest.approx(logp[index - 1, best], abs=1e-5)
    assert result.logprobs is not None
    for index, token in enumerate(result.logprobs, start=len(ids)):
        assert token.token_id == int(logp[index - 1].argmax()) == token.top[0][0]
        assert token.logprob == token.top[0][1] == pytest.approx(logp[index - 1].max(), abs=1e-5)
        assert [p for _, p in token.top] == sorted((p for _, p in token.top), reverse=True)
        assert sum(np.exp(p) for _, p in token.top) <= 1.0 + 1e-6
