"""The engine over a fake model: delivery, ends, forks, preemption, failures, cancels."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.config.engine import EngineConfig
from metrale.config.sampling import SamplingParams
from metrale.engine.engine import Engine
from metrale.errors import CapacityError, DeviceError, RequestError
from tests.engine.fake_model import VOCAB, FakeModel, next_token

EOS = 0


def expected(prompt: tuple[int, ...], count: int, seed: int = 7, choice: int = 0) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens), seed, choice))
    return tuple(tokens[len(prompt) :])


def engine(**kwargs) -> tuple[Engine, FakeModel]:  # type: ignore[no-untyped-def]
    model = FakeModel(**kwargs)
    return Engine(model, None, (EOS,)), model


def params(**kwargs) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 6, **kwargs})


def test_one_request_in_chunks() -> None:
    eng, model = engine(chunk=8)
    prompt = tuple(range(1, 18))
    request = eng.submit(prompt, params())
    eng.run([request])
    result = request.result()
    assert result.token_ids == expected(prompt, 6)
    assert result.finish_reason == "length"
    assert [(c.start, c.stop) for p in model.plans for c in p.chunks] == [(0, 8), (8, 16), (16, 17)]
    assert result.usage.prompt_tokens == 17
    assert result.usage.total_tokens == 23
    assert not model.sequences


def test_many_requests_decode_together() -> None:
    eng, model = engine()
    prompts = [(1, 2, 3), (4,), (5, 6, 7, 8, 9), (10, 11)]
    requests = [eng.submit(p, params(max_tokens=4 + i)) for i, p in enumerate(prompts)]
    eng.run(requests)
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        assert request.result().token_ids == expected(prompt, 4 + i)
    assert max(len(p.decode) for p in model.plans) == 3
    assert not model.sequences


@pytest.mark.parametrize(("ignore", "tokens", "reason"), [(False, 2, "stop"), (True, 6, "length")])
def test_end_token(ignore: bool, tokens: int, reason: str) -> None:
    eng, _ = engine(script={2: EOS})
    request = eng.submit((1, 2), params(ignore_eos=ignore))
    eng.run([request])
    assert len(request.result().token_ids) == tokens
    assert request.result().finish_reason == reason
    assert request.result().completions[0].stop_reason is None


def test_stop_token_is_named_and_not_part_of_the_answer() -> None:
    eng, _ = engine(script={3: 42})
    request = eng.submit((1, 2), params(stop_token_ids=(42,)))
    eng.run([request])
    completion = request.result().completions[0]
    assert (len(completion.token_ids), completion.finish_reason, completion.stop_reason) == (3, "stop", 42)


def test_context_ends_the_answer() -> None:
    eng, model = engine(context=10)
    request = eng.submit((1, 2, 3), params(max_tokens=None))
    eng.run([request])
    assert request.result().finish_reason == "length"
    assert len(request.result().token_ids) == 7
    assert not model.sequences


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_choices_fork_and_differ(rows: int) -> None:
    """The choices are the same whether they share the prompt's blocks or have to wait and prefill on their own."""
    eng, model = engine(rows=rows)
    prompt = tuple(range(1, 14))
    request = eng.submit(prompt, params(n=4))
    eng.run([request])
    for i, completion in enumerate(request.result().completions):
        assert completion.index == i
        assert completion.token_ids == expected(prompt, 6, choice=i)
    assert len({c.token_ids for c in request.result().completions}) == 4
    assert not model.sequences


def test_first_choice_that_ends_at_once_still_forks() -> None:
    eng, model = engine(rows=5)
    request = eng.submit((1, 2, 3), params(n=3, max_tokens=1))
    eng.run([request])
    assert [len(c.token_ids) for c in request.result().completions] == [1, 1, 1]
    assert not model.sequences


def test_preemption_changes_no_token() -> None:
    prompts = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    eng, model = engine(blocks=7)
    requests = [eng.submit(p, params(max_tokens=14)) for p in prompts]
    eng.run(requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.result().token_ids == expected(prompt, 14)
    assert sum(len(p.admit) for p in model.plans) > 3, "someone was preempted"
    assert not model.sequences


def test_a_request_that_outgrows_the_pool_fails_alone() -> None:
    eng, model = engine(blocks=3)
    request = eng.submit((1, 2, 3), params(max_tokens=30))
    eng.run([request])
    with pytest.raises(CapacityError) as caught:
        request.result()
    assert caught.value.code == "capacity.blocks"
    assert not model.sequences
    again = eng.submit((1, 2, 3), params(max_tokens=4))
    eng.run([again])
    assert again.result().token_ids == expected((1, 2, 3), 4)


def test_device_error_ends_the_batch_and_the_engine_goes_on() -> None:
    eng, model = engine()
    model.fail = [DeviceError("op: expected to run, got a fault; try again", code="device.kernel")]
    first, second = eng.submit((1, 2), params()), eng.submit((3, 4), params())
    eng.run([first, second])
    errors = [r.error for r in (first, second) if r.error is not None]
    assert errors
    assert all(isinstance(e, DeviceError) and e.code == "device.kernel" for e in errors)
    third = eng.submit((5, 6), params())
    eng.run([third])
    assert third.result().token_ids == expected((5, 6), 6)
    assert not model.sequences


def test_interrupt_cancels_and_frees() -> None:
    eng, model = engine()
    request = eng.submit((1, 2, 3), params(max_tokens=20))

    def stop(done: int, total: int) -> None:
        if len(request.choices[0].output) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        eng.run([request], stop)
    assert request.finished
    assert request.result().finish_reason == "cancelled"
    assert request.result().token_ids == expected((1, 2, 3), 5)
    assert not model.sequences
    assert not eng.has_work


def test_deltas_add_up_and_logprobs_ride_along() -> None:
    eng, _ = engine()
    request = eng.submit((1, 2, 3), params(logprobs=0, prompt_logprobs=0))
    deltas = []
    while not request.finished:
        eng.step()
        deltas += request.take_deltas()
    assert tuple(t for d in deltas for t in d.token_ids) == expected((1, 2, 3), 6)
    assert deltas[-1].finish_reason == "length"
    assert [len(d.logprobs or ()) for d in deltas] == [len(d.token_ids) for d in deltas]
    result = request.result()
    assert result.logprobs is not None
    assert [lp.token_id for lp in result.logprobs] == list(result.token_ids)
    assert result.prompt_logprobs is not None
    assert [None if p is None else p.token_id for p in result.prompt_logprobs] == [None, 2, 3]


@pytest.mark.parametrize(
    ("ids", "code"),
    [((), "prompt.empty"), ((1, VOCAB), "prompt.token"), ((-1,), "prompt.token"), (tuple([1] * 64), "prompt.length")],
)
def test_bad_prompts(ids: tuple[int, ...], code: str) -> None:
    eng, model = engine()
    with pytest.raises(RequestError) as caught:
        eng.submit(ids, params())
    assert caught.value.code == code
    assert not model.sequences
    assert not eng.has_work


def test_prompt_that_can_never_fit_the_pool() -> None:
    eng, _ = engine(blocks=2)
    with pytest.raises(CapacityError) as caught:
        eng.submit(tuple(range(1, 12)), params())
    assert caught.value.code == "capacity.blocks"
    named = {f.name for f in fields(EngineConfig)} & set(re.findall(r"\w+", str(caught.value)))
    assert named == {"kv_memory_bytes", "kv_blocks"}, "the remedy names options that exist"


def test_stop_strings_need_a_tokenizer() -> None:
    eng, _ = engine()
    with pytest.raises(RequestError) as caught:
        eng.submit((1,), params(stop=("x",)))
    assert caught.value.code == "sampling.stop"


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=7
    ),
    rows=st.integers(1, 4),
    blocks=st.integers(9, 20),
)
def test_any_mix_gives_the_same_tokens(jobs: list[tuple[int, int, int, int]], rows: int, blocks: int) -> None:
    """Whatever runs beside a request, preempted or not, its first choice's tokens are its own; cancels leave no trace."""
    eng, model = engine(rows=rows, blocks=blocks)
    requests = []
    for length, count, n, cancel_at in jobs:
        prompt = tuple((length * 7 + i) % (VOCAB - 1) + 1 for i in range(length))
        requests.append((prompt, count, cancel_at, eng.submit(prompt, params(max_tokens=count, n=n))))
    for step in range(3000):
        if not eng.has_work:
            break
        eng.step()
        for _, _, cancel_at, request in requests:
            if cancel_at == 1 and step == 5:
                eng.cancel(request)
        assert model.free_blocks >= 0
    assert not eng.has_work, "the loop must end"
    for prompt, count, cancel_at, request in requests:
        if cancel_at != 1:
            assert request.result().token_ids == expected(prompt, count)
    assert not model.sequences
