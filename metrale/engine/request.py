"""One request and its choices, as the engine keeps them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from metrale.config.sampling import SamplingParams
from metrale.engine.outputs import Completion, Delta, Result, Timings, TokenLogprob, Usage
from metrale.engine.text_output import TextOutput
from metrale.errors import MetraleError


@dataclass(eq=False, slots=True)
class Choice:
    """One of a request's n continuations.

    seq_id: the model's sequence, None while it holds none (waiting, preempted, finished). `output` holds every token
    that counts for the caller; the end token is not among them.
    """

    request: Request
    index: int
    text: TextOutput
    seq_id: int | None = None
    prefilled: int = 0  # tokens launched into the sequence
    ready: bool = False  # its next step is a decode
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    emitted: int = 0  # tokens handed to the stream so far

    @property
    def finished(self) -> bool:
        """Say whether the choice has ended."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return prompt and output: what a sequence must hold to go on from here."""
        return (*self.request.prompt_ids, *self.output)

    def completion(self) -> Completion:
        """Return the choice as plain data; call after it has finished."""
        wanted = self.request.params.logprobs is not None
        return Completion(
            index=self.index,
            text=self.text.emitted,
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason or "cancelled",
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs[: len(self.output)]) if wanted else None,
        )


@dataclass(eq=False, slots=True)
class Request:
    """A prompt with its parameters, from submit to result."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)  # not yet taken by the stream
    error: MetraleError | None = None
    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def finished(self) -> bool:
        """Say whether nothing more will come."""
        return self.error is not None or all(choice.finished for choice in self.choices)

    @property
    def prompt_done(self) -> int:
        """Return how many prompt tokens have been read."""
        first = self.choices[0]
        whole = len(self.prompt_ids)
        return whole if self.finished or first.output else min(first.prefilled, whole)

    def take_deltas(self) -> Sequence[Delta]:
        """Return and forget the pieces that came since the last call."""
        taken, self.deltas = self.deltas, []
        return taken

    def result(self) -> Result:
        """Return the answer.

        Raises: the request's own error when it failed.
        """
        if self.error is not None:
            raise self.error
        completion_tokens = sum(len(choice.output) for choice in self.choices)
        return Result(
            prompt_token_ids=self.prompt_ids,
            completions=tuple(choice.completion() for choice in self.choices),
            usage=Usage(len(self.prompt_ids), completion_tokens),
            timings=self._timings(completion_tokens),
            seed=self.seed,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
        )

    def _timings(self, completion_tokens: int) -> Timings:
        end = self.ended if self.ended is not None else time.perf_counter()
        started = self.started if self.started is not None else end
        first = self.first_token if self.first_token is not None else end
        return Timings(
            queue_s=started - self.submitted,
            first_token_s=first - self.submitted,
            decode_s=end - first,
            total_s=end - self.submitted,
            completion_tokens=completion_tokens,
        )
