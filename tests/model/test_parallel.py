"""Tensor parallelism: two models in two threads, each with half the heads, give the text of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Comm
from metrale.model.plan import Fork, RowSampling, StepPlan, StepResult
from metrale.model.plan import SequenceSpec as Spec
from metrale.model.transformer import TransformerModel
from tests.model import tiny
from tests.model.conftest import OpenBackend

DRAW = RowSampling(temperature=0.8, seed=6, logprobs=1)
PROMPTS = tuple(tiny.prompt(9 + 30 * i, i) for i in range(3))


def group(kind: str) -> list[Comm]:
    if kind == "reference":
        from metrale.backends.reference.comm import ReferenceComm

        return list(ReferenceComm.group(2))
    from metrale.backends.cpu.comm import thread_group

    return list(thread_group(2))


def run_ranks(comms: list[Comm], work: Callable[[Comm], Any]) -> list[Any]:
    """Run work(comm) in a thread a rank; a rank that fails breaks the group and its error is raised here."""
    results: list[Any] = [None] * len(comms)
    errors: list[BaseException] = []

    def run(comm: Any) -> None:
        try:
            results[comm.rank] = work(comm)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            comm.abort()

    threads = [threading.Thread(target=run, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def run_plans(model: TransformerModel) -> tuple[list[StepResult], Any]:
    """Run the same plans on a rank: chunks, batches, a fork, a compaction."""
    plans = [StepPlan(0, admit=tuple(Spec(i, p, len(p), DRAW if i else tiny.GREEDY) for i, p in enumerate(PROMPTS)))]
    results = [model.execute(plans[0])]
    for i in range(3):
        model.prefill(i)
    logits = model.step_logits()
    results.append(model.execute(StepPlan(1, forks=(Fork(2, 3, len(PROMPTS[2]) - 1, DRAW),), decode=(0, 1, 2, 3))))
    model.compact_sequence(1, 5)
    results += [model.execute(StepPlan(i, decode=(3, 1, 0))) for i in range(2, 20)]
    return results, logits


@pytest.mark.parametrize("fmt", ["f32"])
@pytest.mark.parametrize("graphs", [True, False])
def test_two_ranks_give_the_text_of_one(open_backend: OpenBackend, kind: str, fmt: str, graphs: bool) -> None:
    alone, alone_logits = run_plans(tiny.open_model(open_backend(), fmt=fmt, graphs=graphs))
    comms = group(kind)
    backends = [open_backend(comm=comm, threads=1) for comm in comms]

    def work(comm: Comm) -> Any:
        model = tiny.open_model(backends[comm.rank], fmt=fmt, graphs=graphs)
        assert model._core.cache.arrays == ((tiny.KV_HEADS // 2, tiny.DIM),) * 2
        return run_plans(model)

    (first, first_logits), (second, second_logits) = run_ranks(comms, work)
    assert first == second
    np.testing.assert_array_equal(first_logits, second_logits)
    np.testing.assert_allclose(first_logits, alone_logits, rtol=1e-3, atol=1e-4)
    assert not any(r.failures for r in first)
    assert [[t.token for t in r.tokens] for r in first] == [[t.token for t in r.tokens] for r in alone]


def test_a_rank_that_fails_does_not_leave_the_other_waiting(open_backend: OpenBackend, kind: str) -> None:
    comms = group(kind)
    backends = [open_backend(comm=comm, threads=1) for comm in comms]

    def work(comm: Comm) -> Any:
        model = tiny.open_model(backends[comm.rank])
        tiny.start(model, 1, PROMPTS[0])
        if comm.rank == 1:
            raise ZeroDivisionError
        tiny.continue_(model, [1], 5)

    with pytest.raises(ZeroDivisionError):
        run_ranks(comms, work)
