"""From SamplingParams to words, and what the words do in a batch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from metrale.backends.base import FIELD, MAX_BIAS, Backend
from metrale.config.sampling import SamplingParams
from metrale.errors import RequestError
from metrale.model.plan import Bias, Chunk, RowSampling, SequenceSpec
from metrale.model.sampler import FOREVER, draw_seed, field_words, float_bits, row_sampling, signed
from tests.model import tiny


def test_parameters_become_row_data() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={7: 2.5, 3: -1.0}, bad_token_ids=(9,), stop_token_ids=(4,), min_tokens=3, seed=2**64 - 1, logprobs=2,
    )  # fmt: skip
    row = row_sampling(params, prompt_len=10, eos_ids=(1, 2), seed=5, choice=3)
    ban = -math.inf
    assert row.bias == (
        Bias(3, -1.0, FOREVER), Bias(7, 2.5, FOREVER), Bias(9, ban, FOREVER),
        Bias(1, ban, 13), Bias(2, ban, 13), Bias(4, ban, 13),
    )  # fmt: skip
    assert (row.seed, row.choice, row.logprobs, row.repetition, row.frequency) == (2**64 - 1, 3, 2, 1.1, -0.5)
    ignoring = row_sampling(SamplingParams(min_tokens=3, ignore_eos=True, stop_token_ids=(4,)), prompt_len=1, eos_ids=(1, 2))
    assert [b.token for b in ignoring.bias] == [4]


def test_an_absent_seed_is_drawn_once() -> None:
    assert row_sampling(SamplingParams(), prompt_len=1, eos_ids=(), seed=17).seed == 17
    seeds = {row_sampling(SamplingParams(), prompt_len=1, eos_ids=()).seed for _ in range(5)} | {draw_seed()}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_too_many_entries_are_refused() -> None:
    params = SamplingParams(logit_bias={i: 1.0 for i in range(MAX_BIAS)}, min_tokens=1)
    with pytest.raises(RequestError, match=f"expected at most {MAX_BIAS}"):
        row_sampling(params, prompt_len=1, eos_ids=(1,))


def test_words_are_32_bits_each() -> None:
    words = field_words(RowSampling(temperature=0.5, seed=0xFFFFFFFE_00000001), token=5, index=6, limit=16, prompt_len=4)
    assert words[FIELD["seed_lo"]] == 1
    assert words[FIELD["seed_hi"]] == -2
    assert np.array(words, np.int32)[FIELD["temperature"] : FIELD["temperature"] + 1].view(np.float32)[0] == 0.5
    assert (words[FIELD["logprobs"]], words[FIELD["num_bias"]], words[FIELD["flag"]]) == (-1, 0, 0)
    assert float_bits(-math.inf) == signed(0xFF800000)


def test_bans_and_bias_hold_as_long_as_they_should(device: Backend) -> None:
    model, prompt = tiny.open_model(device), tiny.prompt(9)
    plain = tiny.generate(model, prompt, 12)
    until = RowSampling(bias=(Bias(plain[0], -math.inf, len(prompt) + 1), Bias(plain[1], 0.0, FOREVER)))
    assert tiny.generate(model, prompt, 12, until)[0] != plain[0]
    forced = RowSampling(bias=(Bias(50, 1000.0, len(prompt) + 2), Bias(60, 1000.0, len(prompt) + 5)))
    got = tiny.generate(model, prompt, 8, forced)
    assert got[2:5] == [60, 60, 60]
    assert set(got[:2]) <= {50, 60}
    assert got[5:] != [60, 60, 60]
    assert tiny.generate(model, prompt, 12) == plain


def test_many_entries_go_through_more_than_one_patch(device: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metrale.model.staging.PATCH_WORDS", 50)
    model, prompt = tiny.open_model(device), tiny.prompt(9)
    banned = RowSampling(bias=tuple(Bias(i, -math.inf, FOREVER) for i in range(97)))
    assert tiny.generate(model, prompt, 6, banned) == [97] * 6


def test_the_same_seed_draws_the_same_and_choices_differ(device: Backend) -> None:
    model, prompt = tiny.open_model(device), tiny.prompt(9)
    texts = [
        tiny.generate(model, prompt, 16, RowSampling(temperature=1.5, seed=s, choice=c))
        for s, c in ((1, 0), (1, 0), (2, 0), (1, 1))
    ]
    assert texts[0] == texts[1]
    assert len({tuple(t) for t in texts}) == 3


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    values = values - values.max()
    return np.asarray(values - np.log(np.exp(values).sum()))


def test_logprobs_are_the_models_own(device: Backend) -> None:
    model, prompt = tiny.open_model(device), tiny.prompt(9)
    sampling = RowSampling(temperature=1.5, seed=4, repetition=1.5, presence=0.5, logprobs=3, bias=(Bias(5, 3.0, FOREVER),))
    tiny.start(model, 1, prompt, sampling)
    tiny.start(model, 2, tiny.prompt(4))
    results = [model.decode_batch([2, 1]) for _ in range(4)]
    tokens = model.sequence(1).tokens
    want = model.score(tokens[:-1])
    for other, mine in results:
        assert (other.logprob, other.top) == (None, ())
        logp = log_softmax(want[mine.index - 1])
        assert tokens[mine.index] == mine.token
        assert mine.logprob == pytest.approx(logp[mine.token], abs=1e-4)
        best = np.argsort(-logp, kind="stable")[:3]
        assert [t for t, _ in mine.top] == best.tolist()
        assert [v for _, v in mine.top] == pytest.approx(logp[best].tolist(), abs=1e-4)


@pytest.mark.parametrize("size", [64, 7])
def test_prompt_logprobs_do_not_depend_on_chunks(device: Backend, size: int) -> None:
    model, prompt = tiny.open_model(device), tiny.prompt(20)
    known = (*prompt, 3, 4)  # of a request that is run again: only the prompt is reported
    model.alloc_sequence(SequenceSpec(1, known, len(prompt), RowSampling(logprobs=0), prompt_logprobs=2))
    for start in range(0, len(known), size):
        result = model.prefill_chunk(Chunk(1, start, min(len(known), start + size)))
    assert result is not None
    assert result.index == len(known)
    found = model.take_prompt_logprobs(1)
    assert model.take_prompt_logprobs(1) == ()
    logits = model.score(prompt)
    assert [(f.index, f.token) for f in found] == [(i, prompt[i]) for i in range(1, 20)]
    for entry in found:
        logp = log_softmax(logits[entry.index - 1])
        assert entry.logprob == pytest.approx(logp[entry.token], abs=1e-4)
        assert [t for t, _ in entry.top] == np.argsort(-logp, kind="stable")[:2].tolist()
