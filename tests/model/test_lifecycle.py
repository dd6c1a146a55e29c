"""Sequences: what is refused, what is released, what plans do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metrale.backends.base import Backend
from metrale.errors import CapacityError, MetraleError, RequestError
from metrale.model.plan import Bias, Chunk, Fork, PromptLogprob, RowSampling, SequenceSpec, StepPlan, StepResult, TokenResult
from metrale.model.protocols import Model
from metrale.model.sequence import RowPool
from metrale.model.transformer import TransformerModel
from tests.model import tiny


def spec(seq_id: int, tokens: Any, **more: Any) -> SequenceSpec:
    return SequenceSpec(seq_id, tuple(tokens), more.pop("prompt_len", len(tokens)), more.pop("sampling", tiny.GREEDY), **more)


def test_the_model_is_what_the_protocols_say(device: Backend) -> None:
    model: Model = tiny.open_model(device)
    for protocol in Model.__mro__:
        for name in vars(protocol):
            assert name.startswith("_") or hasattr(model, name), name


def test_rows_are_released_once() -> None:
    pool = RowPool(3)
    guards = [pool.claim() for _ in range(3)]
    assert [g.row for g in guards] == [0, 1, 2]
    with pytest.raises(CapacityError):
        pool.claim()
    guards[1].release()
    guards[1].release()
    assert pool.free == 1
    with pytest.raises(CapacityError):
        pool.claim(0)
    assert pool.claim(1).row == 1
    guards[0].release()
    with pytest.raises(MetraleError) as err:
        pool.release(0)
    assert err.value.code == "row.release"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (spec(9, ()), "prompt.empty"),
        (spec(9, tiny.prompt(224)), "prompt.length"),
        (spec(9, (1, 98)), "prompt.token"),
        (spec(9, (1, -1)), "prompt.token"),
        (spec(9, (1, 2), prompt_len=0), "prompt.length"),
        (spec(9, (1, 2), prompt_len=3), "prompt.length"),
        (spec(1, (1, 2)), "sequence.exists"),
    ],
)
def test_bad_sequences_are_refused(reference: Backend, wrong: SequenceSpec, code: str) -> None:
    model = tiny.open_model(reference)
    tiny.start(model, 1, tiny.prompt(5))
    with pytest.raises(RequestError) as err:
        model.alloc_sequence(wrong)
    assert err.value.code == code
    assert model.free_rows == 5


def test_calls_out_of_order_are_refused(reference: Backend) -> None:
    model = tiny.open_model(reference)
    tiny.start(model, 1, tiny.prompt(20))
    model.alloc_sequence(spec(2, tiny.prompt(30)))
    before = model.stats, model.sequence(1), model.sequence(2)
    calls: list[tuple[str, Any]] = [
        ("sequence.unknown", lambda: model.decode(7)),
        ("sequence.unknown", lambda: model.prefill(7)),
        ("sequence.unknown", lambda: model.sequence(7)),
        ("sequence.state", lambda: model.decode_batch([1, 2])),
        ("sequence.state", lambda: model.decode_batch([1, 1])),
        ("sequence.state", lambda: model.prefill(1)),
        ("chunk.range", lambda: model.prefill_chunk(Chunk(2, 1, 5))),
        ("chunk.range", lambda: model.prefill_chunk(Chunk(2, 0, 0))),
        ("chunk.range", lambda: model.prefill_chunk(Chunk(2, 0, 31))),
        ("sequence.state", lambda: model.fork_sequence(Fork(1, 3, 21, tiny.GREEDY))),
        ("sequence.state", lambda: model.fork_sequence(Fork(2, 3, 5, tiny.GREEDY))),
        ("sequence.exists", lambda: model.fork_sequence(Fork(1, 2, 19, tiny.GREEDY))),
        ("sequence.row", lambda: model.compact_sequence(1, 1)),
        ("sequence.row", lambda: model.compact_sequence(1, 6)),
    ]
    for code, call in calls:
        with pytest.raises(RequestError) as err:
            call()
        assert err.value.code == code
        assert (model.stats, model.sequence(1), model.sequence(2)) == before
    model.free_sequence(7)
    assert model.decode_batch([]) == ()


def test_a_chunk_longer_than_the_buffers_is_refused(reference: Backend) -> None:
    model = tiny.open_model(reference)
    model.alloc_sequence(spec(1, tiny.prompt(100)))
    with pytest.raises(RequestError, match="at most 64"):
        model.prefill_chunk(Chunk(1, 0, 65))


def test_blocks_that_run_out_stop_a_step_before_it_runs(device: Backend) -> None:
    model = tiny.open_model(device, max_context=64, kv_blocks=6)
    want = tiny.generate(model, tiny.prompt(30, 1), 20)
    tiny.start(model, 1, tiny.prompt(30, 1))
    tiny.start(model, 2, tiny.prompt(30, 2))
    tiny.continue_(model, [1, 2], 2)
    with pytest.raises(CapacityError) as err:
        tiny.continue_(model, [1, 2], 5)
    assert err.value.code == "capacity.blocks"
    model.alloc_sequence(spec(3, tiny.prompt(20)))
    with pytest.raises(CapacityError):
        model.prefill(3)
    model.free_sequence(3)
    model.free_sequence(2)
    assert tiny.continue_(model, [1], 15)[0] == want[: len(model.sequence(1).tokens) - 30]


def test_the_context_ends(device: Backend) -> None:
    model = tiny.open_model(device, max_context=40)
    tiny.start(model, 1, tiny.prompt(37))
    tiny.continue_(model, [1], 3)
    assert len(model.sequence(1).tokens) == 41
    with pytest.raises(CapacityError) as err:
        model.decode(1)
    assert err.value.code == "capacity.context"


def test_freed_sequences_leave_nothing(device: Backend) -> None:
    model = tiny.open_model(device)
    for round_ in range(3):
        for i in range(6):
            tiny.start(model, i, tiny.prompt(10 * i + 1, i))
        with pytest.raises(CapacityError) as err:
            model.alloc_sequence(spec(9, (1,)))
        assert err.value.code == "capacity.rows"
        tiny.continue_(model, list(range(6)), 3)
        assert model.detach_row(round_) == model._core.limits.rows - 6 + round_
        assert model.free_rows == 1
        with pytest.raises(RequestError):
            model.decode(round_)
        for i in range(6):
            model.free_sequence(i)
            model.free_sequence(i)
        assert (model.free_blocks, model.free_rows) == (model.limits.blocks, 6)
    model.close()
    model.close()


def test_after_forward_runs_only_after_a_chunk_that_succeeded(device: Backend) -> None:
    model = tiny.open_model(device)
    seen: list[Chunk] = []
    model._chunks.after_forward_ok.append(lambda seq, chunk: seen.append(chunk))
    model.alloc_sequence(spec(1, tiny.prompt(70)))

    def fail(name: str) -> None:
        raise MetraleError("injected")

    device.fault = fail
    with pytest.raises(MetraleError, match="injected"):
        model.prefill_chunk(Chunk(1, 0, 64))
    device.fault = None
    assert seen == []
    model.prefill(1)
    assert seen == [Chunk(1, 0, 64), Chunk(1, 64, 70)]


# --- plans -----------------------------------------------------------------------------------------------------------


def through_json(plan: StepPlan) -> StepPlan:
    return StepPlan.from_json(json.loads(json.dumps(plan.to_json())))


def test_plans_and_results_survive_json() -> None:
    sampling = RowSampling(temperature=0.1, seed=2**64 - 1, bias=(Bias(3, float("-inf"), 9),), logprobs=2)
    plan = StepPlan(7, (1,), (SequenceSpec(2, (3, 4), 2, sampling, 1),), (Fork(2, 5, 1, sampling),), (Chunk(2, 0, 2),), (5, 2))
    assert through_json(plan) == plan
    result = StepResult(7, (TokenResult(2, 2, 9, -0.1, ((9, -0.1), (1, -3.0))),), (PromptLogprob(2, 1, 4, -1.0, ((4, -1.0),)),))
    assert StepResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def run_plans(model: TransformerModel) -> tuple[list[StepResult], list[StepPlan]]:
    draw = RowSampling(temperature=1.0, seed=3)
    plans = [
        StepPlan(1, admit=(spec(1, tiny.prompt(33), sampling=draw),), chunks=(Chunk(1, 0, 20),)),
        StepPlan(
            2, admit=(spec(2, tiny.prompt(8), prompt_logprobs=1),), chunks=(Chunk(1, 20, 33), Chunk(2, 0, 8)), decode=(1, 2)
        ),
        StepPlan(3, forks=(Fork(1, 3, 32, RowSampling(temperature=1.0, seed=3, choice=1)),), decode=(3, 2, 1)),
        StepPlan(4, retire=(2,), decode=(1, 3)),
    ]
    return [model.execute(plan) for plan in plans], plans


def test_a_plan_does_what_the_calls_do(device: Backend) -> None:
    results, _ = run_plans(tiny.open_model(device))
    assert [[(t.seq_id, t.index) for t in r.tokens] for r in results] == [
        [],
        [(1, 33), (2, 8), (1, 34), (2, 9)],
        [(3, 33), (2, 10), (1, 35)],
        [(1, 36), (3, 34)],
    ]
    assert [p.index for p in results[1].prompt_logprobs] == list(range(1, 8))
    assert not any(r.failures for r in results)
    model = tiny.open_model(device)
    want = tiny.generate(model, tiny.prompt(33), 4, RowSampling(temperature=1.0, seed=3))
    assert [t.token for r in results for t in r.tokens if t.seq_id == 1] == want


def test_a_recorded_log_of_plans_replays_the_run(device: Backend) -> None:
    results, plans = run_plans(tiny.open_model(device))
    model = tiny.open_model(device)
    assert [model.execute(through_json(plan)) for plan in plans] == results


def test_a_part_that_fails_is_reported_and_the_others_run(device: Backend) -> None:
    model = tiny.open_model(device, max_context=64, kv_blocks=6)
    tiny.start(model, 1, tiny.prompt(10))
    plan = StepPlan(1, admit=(spec(2, tiny.prompt(60)), spec(3, (99,)), spec(4, (1, 2))),
                    chunks=(Chunk(2, 0, 60), Chunk(3, 0, 1), Chunk(4, 0, 2)), decode=(1, 4))  # fmt: skip
    model.alloc_sequence(spec(5, tiny.prompt(33, 5)))
    model.prefill(5)
    result = model.execute(plan)
    assert [(f.part, f.seq_ids, f.error, f.code) for f in result.failures] == [
        ("admit", (3,), "RequestError", "prompt.token"),
        ("chunk", (2,), "CapacityError", "capacity.blocks"),
        ("chunk", (3,), "RequestError", "sequence.unknown"),
    ]
    assert [t.seq_id for t in result.tokens] == [4, 1, 4]
