"""What each sampling parameter does to a real text."""

from __future__ import annotations

from typing import Any

import pytest

from metrale import LLM, SamplingParams

pytestmark = pytest.mark.model

PROMPT = "The capital of France is"


def greedy(llm: LLM, prompt: Any, max_tokens: int = 16, **fields: Any) -> Any:
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, **fields))


@pytest.fixture(scope="module")
def free(llm: LLM) -> Any:
    """The greedy answer nothing interferes with."""
    return greedy(llm, PROMPT)


def test_it_knows_the_capital(free: Any) -> None:
    assert free.text.startswith(" Paris")
    assert free.finish_reason == "length"
    assert free.usage.completion_tokens == len(free.token_ids) == 16


def test_a_stop_string_may_span_tokens(llm: LLM, free: Any) -> None:
    # The end of one token, the whole next ones, and the beginning of another.
    spelled = [llm.tokenizer.decode([i]) for i in free.token_ids]
    wide = next(k for k in range(3, 13) if len(spelled[k]) > 1 and len(spelled[k + 2]) > 1)
    stop = spelled[wide][1:] + spelled[wide + 1] + spelled[wide + 2][:1]
    assert free.text.count(stop) == 1
    got = greedy(llm, PROMPT, stop=("never in it", stop))
    assert got.text == free.text[: free.text.index(stop)]
    assert got.completions[0].stop_reason == stop
    assert got.finish_reason == "stop"
    assert got.token_ids == free.token_ids[: wide + 3]
    streamed = list(llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=16, stop=stop)))
    assert "".join(d.text for d in streamed) == got.text


def test_text_held_back_for_a_stop_string_comes_in_the_end(llm: LLM, free: Any) -> None:
    assert greedy(llm, PROMPT, stop=free.text[-3:] + "\0 and more").text == free.text


def test_min_tokens_delays_stops(llm: LLM, free: Any) -> None:
    ending = free.token_ids[2]
    assert greedy(llm, PROMPT, stop_token_ids=(ending,)).token_ids == free.token_ids[: free.token_ids.index(ending)]
    later = greedy(llm, PROMPT, stop_token_ids=(ending,), min_tokens=9)
    assert len(later.token_ids) >= 9
    assert ending not in later.token_ids[:9]
    first = llm.tokenizer.decode([free.token_ids[0]])
    assert greedy(llm, PROMPT, stop=first).token_ids == free.token_ids[:1]
    waited = greedy(llm, PROMPT, stop=first, min_tokens=2)
    assert waited.text.startswith(first)
    assert waited.token_ids[:2] == free.token_ids[:2]


def test_ignore_eos(llm: LLM) -> None:
    question = llm.chat_ids([{"role": "user", "content": "Hi"}])
    ended = greedy(llm, question, 48)
    assert ended.finish_reason == "stop"
    assert ended.completions[0].stop_reason is None
    assert len(ended.token_ids) < 48
    goes_on = greedy(llm, question, len(ended.token_ids) + 4, ignore_eos=True)
    assert goes_on.finish_reason == "length"
    assert goes_on.token_ids[: len(ended.token_ids) + 1] == (*ended.token_ids, 2)
    assert "<|im_end|>" not in goes_on.text
    forced = greedy(llm, question, len(ended.token_ids) + 4, min_tokens=len(ended.token_ids) + 2)
    assert len(forced.token_ids) >= len(ended.token_ids) + 2
    assert 2 not in forced.token_ids


def test_bias_and_bad_tokens(llm: LLM, free: Any) -> None:
    paris = free.token_ids[0]
    assert paris not in greedy(llm, PROMPT, bad_token_ids=(paris,)).token_ids
    assert paris not in greedy(llm, PROMPT, logit_bias={paris: -100}).token_ids
    assert set(greedy(llm, PROMPT, 5, logit_bias={paris: 100}).token_ids) == {paris}
    tilted = greedy(llm, PROMPT, logit_bias={paris: -100}, logprobs=1)
    assert tilted.logprobs[0].top[0][0] == paris, "logprobs are the model's own, before the bias"


def test_repetition_penalty(llm: LLM) -> None:
    plain = greedy(llm, PROMPT, 40)
    most = max(plain.token_ids.count(i) for i in plain.token_ids)
    assert most >= 3, "left alone it repeats itself"
    for fields in ({"repetition_penalty": 1.8}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        kept = greedy(llm, PROMPT, 40, **fields)
        assert len(set(kept.token_ids)) > len(set(plain.token_ids)), fields
    strict = greedy(llm, PROMPT, 40, repetition_penalty=100.0)
    assert max(strict.token_ids.count(i) for i in strict.token_ids) < most


def test_narrow_filters_are_greedy(llm: LLM, free: Any) -> None:
    for fields in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-3}):
        params = SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 16, **fields})
        assert llm.generate(PROMPT, params).token_ids == free.token_ids, fields


def test_seeds_matter(llm: LLM) -> None:
    seen = {llm.generate(PROMPT, temperature=1.5, seed=seed, max_tokens=8).token_ids for seed in range(4)}
    assert len(seen) == 4


def test_logprobs_of_sampled_tokens(llm: LLM) -> None:
    result = llm.generate(PROMPT, SamplingParams(temperature=1.4, seed=2, max_tokens=10, logprobs=5, ignore_eos=True))
    again = greedy(llm, [*result.prompt_token_ids, *result.token_ids], 1, prompt_logprobs=0)
    assert result.logprobs is not None
    want = [entry.logprob for entry in again.prompt_logprobs[len(result.prompt_token_ids) :]]
    assert [entry.logprob for entry in result.logprobs] == pytest.approx(want, abs=1e-5)
    assert sum(want) == pytest.approx(sum(entry.logprob for entry in result.logprobs), abs=1e-4)
    assert all(len(entry.top) == 5 for entry in result.logprobs)


def test_a_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = llm.chat(messages, temperature=0, max_tokens=40)
    assert answer.text.startswith("Hello!")
    assert answer.finish_reason == "stop"
    assert "".join(d.text for d in llm.chat(messages, stream=True, temperature=0, max_tokens=40)) == answer.text
