"""A model without weights: the next token is a hash of the tokens so far, blocks and rows are counted for real."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from metrale.errors import CapacityError, MetraleError, RequestError
from metrale.model.plan import (
    Chunk,
    Fork,
    PromptLogprob,
    SequenceSpec,
    StepFailure,
    StepPlan,
    StepResult,
    TokenResult,
)
from metrale.model.protocols import ModelLimits

VOCAB = 97
BLOCK = 4


def next_token(tokens: tuple[int, ...], seed: int, choice: int) -> int:
    """Return what the fake model says after `tokens`; never 0, which tests use as the end token."""
    digest = hashlib.sha256(repr((tokens, seed, choice)).encode()).digest()
    return 1 + int.from_bytes(digest[:4], "little") % (VOCAB - 1)


@dataclass
class FakeSequence:
    spec: SequenceSpec
    tokens: list[int]
    launched: int = 0
    shared_blocks: int = 0


@dataclass
class FakeModel:
    """Implements the parts of `Model` the engine uses; `script` maps output length to a forced token."""

    rows: int = 3
    blocks: int = 40
    context: int = 64
    chunk: int = 8
    script: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, FakeSequence] = field(default_factory=dict)
    fail: list[MetraleError] = field(default_factory=list)  # raised by the next decode batches
    plans: list[StepPlan] = field(default_factory=list)

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.context, self.rows, self.chunk, BLOCK, self.blocks, VOCAB)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // BLOCK)

    @property
    def free_blocks(self) -> int:
        return self.blocks - sum(self.blocks_for(s.launched) - s.shared_blocks for s in self.sequences.values())

    @property
    def free_rows(self) -> int:
        return self.rows - len(self.sequences)

    def free_sequence(self, seq_id: int) -> None:
        self.sequences.pop(seq_id, None)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        tokens: list[TokenResult] = []
        prompt: list[PromptLogprob] = []
        failures: list[StepFailure] = []

        def part(name: str, ids: tuple[int, ...], action) -> None:  # type: ignore[no-untyped-def]
            try:
                tokens.extend(action())
            except MetraleError as error:
                failures.append(StepFailure(name, ids, type(error).__name__, error.code, str(error)))

        for seq_id in plan.retire:
            self.free_sequence(seq_id)
        for spec in plan.admit:
            part("admit", (spec.seq_id,), lambda s=spec: self._admit(s))
        for fork in plan.forks:
            part("fork", (fork.seq_id,), lambda f=fork: self._fork(f))
        for chunk in plan.chunks:
            part("chunk", (chunk.seq_id,), lambda c=chunk: self._chunk(c, prompt))
        if plan.decode:
            part("decode", plan.decode, lambda: self._decode(plan.decode))
        return StepResult(plan.step, tuple(tokens), tuple(prompt), tuple(failures))

    def _admit(self, spec: SequenceSpec) -> list[TokenResult]:
        if self.free_rows < 1:
            raise CapacityError("row: expected a free one, got none; wait", code="capacity.rows")
        self.sequences[spec.seq_id] = FakeSequence(spec, list(spec.tokens))
        return []

    def _fork(self, fork: Fork) -> list[TokenResult]:
        parent = self.sequences[fork.parent_id]
        if self.free_rows < 1:
            raise CapacityError("row: expected a free one, got none; wait", code="capacity.rows")
        tokens = parent.tokens[: fork.at + 1]
        spec = SequenceSpec(fork.seq_id, tuple(tokens), len(tokens), fork.sampling)
        self.sequences[fork.seq_id] = FakeSequence(spec, tokens, fork.at, fork.at // BLOCK)
        return []

    def _room(self, seq_id: int, launched: int) -> None:
        need = self.blocks_for(launched) - self.blocks_for(self.sequences[seq_id].launched)
        if need > self.free_blocks:
            raise CapacityError("blocks: expected a free one, got none; wait", code="capacity.blocks")

    def _chunk(self, chunk: Chunk, prompt: list[PromptLogprob]) -> list[TokenResult]:
        if chunk.seq_id not in self.sequences:
            raise RequestError("sequence: expected a live one, got none; admit it", code="sequence.state")
        seq = self.sequences[chunk.seq_id]
        assert chunk.start == seq.launched
        assert chunk.start < chunk.stop <= len(seq.tokens)
        assert chunk.stop - chunk.start <= self.chunk
        self._room(chunk.seq_id, chunk.stop)
        seq.launched = chunk.stop
        if seq.spec.prompt_logprobs is not None:
            prompt += [PromptLogprob(chunk.seq_id, i, seq.tokens[i], -float(i)) for i in range(max(chunk.start, 1), chunk.stop)]
        return [self._next(chunk.seq_id)] if chunk.stop == len(seq.tokens) else []

    def _decode(self, ids: tuple[int, ...]) -> list[TokenResult]:
        if self.fail:
            raise self.fail.pop(0)
        assert len(set(ids)) == len(ids)
        need = sum(self.blocks_for(s.launched + 1) - self.blocks_for(s.launched) for s in map(self.sequences.__getitem__, ids))
        if need > self.free_blocks:
            raise CapacityError("blocks: expected a free one, got none; wait", code="capacity.blocks")
        for seq_id in ids:
            self.sequences[seq_id].launched += 1
        return [self._next(seq_id) for seq_id in ids]

    def _next(self, seq_id: int) -> TokenResult:
        seq = self.sequences[seq_id]
        sampling = seq.spec.sampling
        made = len(seq.tokens) - seq.spec.prompt_len
        token = self.script.get(made, next_token(tuple(seq.tokens), sampling.seed, sampling.choice))
        seq.tokens.append(token)
        logprob = None if sampling.logprobs is None else -0.5
        return TokenResult(seq_id, len(seq.tokens) - 1, token, logprob)
