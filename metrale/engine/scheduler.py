"""Which sequences run in the next step: first come, first served, one prefill chunk beside the decode batch.

Three verbs: `plan` says what to run, `release` takes a finished choice out, `preempt` sends the youngest one back to the
queue when the K/V blocks run out; it starts again from its tokens, and since a token's draw depends on its index alone,
its text does not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from metrale.engine.request import Choice, Request
from metrale.model.plan import Chunk, Fork, RowSampling, SequenceSpec, StepPlan
from metrale.model.protocols import Model
from metrale.model.sampler import row_sampling


class Scheduler:
    """The queue, the choices that hold a sequence, and the next plan."""

    def __init__(self, model: Model, eos_ids: tuple[int, ...]) -> None:
        self._model = model
        self._eos_ids = eos_ids
        self._waiting: deque[Choice] = deque()
        self._running: list[Choice] = []  # in order of admission
        self._retire: list[int] = []
        self._next_seq = 0
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Say whether a plan would do anything."""
        return bool(self._waiting or self._running or self._retire)

    @property
    def num_waiting(self) -> int:
        """Return how many choices hold no sequence yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Return how many choices hold a sequence."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request; its further choices fork from the first when its prompt is done."""
        self._waiting.append(request.choices[0])

    def by_seq(self) -> dict[int, Choice]:
        """Return the running choices by sequence id."""
        return {choice.seq_id: choice for choice in self._running if choice.seq_id is not None}

    def plan(self) -> StepPlan:
        """Return the next step: sequences to retire and admit, at most one chunk, and every choice ready to decode."""
        retire = tuple(self._retire)
        decode = tuple(c.seq_id for c in self._running if c.ready and c.seq_id is not None)
        admit = self._admit(len(retire))
        chunk = self._chunk()
        self._step += 1
        return StepPlan(step=self._step, retire=retire, admit=admit, chunks=() if chunk is None else (chunk,), decode=decode)

    def fork_plan(self, parent: Choice) -> StepPlan | None:
        """Return the forks of a request whose first choice has just been prefilled, as many as there are rows."""
        waiting = set(map(id, self._waiting))  # after an interrupt they may be queued already
        siblings = [
            c for c in parent.request.choices[1:] if c.seq_id is None and not c.finished and id(c) not in waiting
        ]
        at = len(parent.request.prompt_ids) - 1
        fits = siblings[: self._model.free_rows]
        # What does not fit now is prefilled on its own later: the same tokens and draws, only slower.
        self._waiting.extendleft(reversed(siblings[len(fits) :]))
        forks = []
        for choice in fits:
            choice.seq_id, choice.prefilled, choice.ready = self._take_seq_id(), at, True
            self._running.append(choice)
            assert parent.seq_id is not None
            forks.append(Fork(parent.seq_id, choice.seq_id, at, self._sampling(choice)))
        if not forks:
            return None
        self._step += 1
        return StepPlan(step=self._step, forks=tuple(forks))

    def release(self, choice: Choice) -> None:
        """Take a finished (or cancelled) choice out; its sequence is retired by the next plan."""
        if choice in self._waiting:
            self._waiting.remove(choice)
        if choice in self._running:
            self._running.remove(choice)
        if choice.seq_id is not None:
            self._retire.append(choice.seq_id)
            choice.seq_id = None

    @property
    def retiring(self) -> tuple[int, ...]:
        """Return the sequences that wait to be retired."""
        return tuple(self._retire)

    def retired(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that the model has freed; until then every plan names them, so an interrupt loses none."""
        gone = set(seq_ids)
        self._retire = [seq_id for seq_id in self._retire if seq_id not in gone]

    def preempt(self, keep: Choice | None = None) -> Choice | None:
        """Send the youngest running choice (but not `keep`) back to the front of the queue; None when there is no other."""
        for choice in reversed(self._running):
            if choice is not keep:
                self.requeue(choice)
                return choice
        return None

    def requeue(self, choice: Choice) -> None:
        """Put a choice back to the front of the queue; it starts again from its tokens."""
        self.release(choice)
        choice.prefilled, choice.ready = 0, False
        if choice.index == 0 and not choice.output:
            choice.request.prompt_logprobs.clear()  # its prompt is read again from the start
        self._waiting.appendleft(choice)

    def requeue_all(self) -> None:
        """Put every running choice back, in order: what a step did before it was interrupted is not known."""
        for choice in reversed(tuple(self._running)):
            self.requeue(choice)

    def _take_seq_id(self) -> int:
        self._next_seq += 1
        return self._next_seq

    def _sampling(self, choice: Choice) -> RowSampling:
        request = choice.request
        return row_sampling(
            request.params, prompt_len=len(request.prompt_ids), eos_ids=self._eos_ids, seed=request.seed, choice=choice.index
        )

    def _admit(self, num_retiring: int) -> tuple[SequenceSpec, ...]:
        """Admit from the front of the queue while rows and blocks last; one prompt prefills at a time."""
        if not self._waiting or any(not c.ready for c in self._running):
            return ()
        choice = self._waiting[0]
        need = self._model.blocks_for(len(choice.tokens) + 1)
        # A running sequence may want a block in this very step, so one each is left to them.
        if self._running and (self._model.free_rows + num_retiring < 1 or self._model.free_blocks < need + len(self._running)):
            return ()
        self._waiting.popleft()
        choice.seq_id = self._take_seq_id()
        self._running.append(choice)
        request = choice.request
        wants_prompt = choice.index == 0 and not choice.output and not request.prompt_logprobs
        return (
            SequenceSpec(
                choice.seq_id,
                choice.tokens,
                len(request.prompt_ids),
                self._sampling(choice),
                request.params.prompt_logprobs if wants_prompt else None,
            ),
        )

    def _chunk(self) -> Chunk | None:
        for choice in self._running:
            if choice.seq_id is not None and not choice.ready:
                stop = min(len(choice.tokens), choice.prefilled + self._model.limits.chunk_tokens)
                return Chunk(choice.seq_id, choice.prefilled, stop)
        return None
