"""Running a StepPlan: its parts in order, each for itself; a part that fails is reported and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from metrale.errors import MetraleError
from metrale.model.batch import DecodeBatch
from metrale.model.chunks import PrefillChunks
from metrale.model.lifecycle import Lifecycle
from metrale.model.plan import PromptLogprob, StepFailure, StepPlan, StepResult, TokenResult


class Execute:
    """Plans, run on one rank. Every rank that runs the same plan ends in the same state."""

    def __init__(self, lifecycle: Lifecycle, chunks: PrefillChunks, batch: DecodeBatch) -> None:
        """Run plans through a model's concerns."""
        self._lifecycle = lifecycle
        self._chunks = chunks
        self._batch = batch

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan. See `ModelForward.execute`."""
        tokens: list[TokenResult] = []
        prompt_logprobs: list[PromptLogprob] = []
        failures: list[StepFailure] = []
        for seq_id in plan.retire:
            with _part(failures, "retire", (seq_id,)):
                self._lifecycle.free(seq_id)
        for spec in plan.admit:
            with _part(failures, "admit", (spec.seq_id,)):
                self._lifecycle.alloc(spec)
        for fork in plan.forks:
            with _part(failures, "fork", (fork.seq_id,)):
                self._lifecycle.fork(fork)
        for chunk in plan.chunks:
            with _part(failures, "chunk", (chunk.seq_id,)):
                result = self._chunks.run(chunk)
                prompt_logprobs += self._chunks.take_prompt_logprobs(chunk.seq_id)
                if result is not None:
                    tokens.append(result)
        if plan.decode:
            with _part(failures, "decode", plan.decode):
                tokens += self._batch.run(plan.decode)
        return StepResult(plan.step, tuple(tokens), tuple(prompt_logprobs), tuple(failures))


@contextmanager
def _part(failures: list[StepFailure], name: str, seq_ids: tuple[int, ...]) -> Iterator[None]:
    """Run a part; a MetraleError becomes its failure."""
    try:
        yield
    except MetraleError as error:
        failures.append(StepFailure(name, seq_ids, type(error).__name__, error.code, str(error)))
