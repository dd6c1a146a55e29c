"""What a caller gets back: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability under the model (before penalties and temperature), and the best alternatives.

    top: (token id, logprob) pairs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, all choices together."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Return prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, in seconds.

    queue_s: submit to first prefill; first_token_s: submit to first token; decode_s: first to last token.
    """

    queue_s: float
    first_token_s: float
    decode_s: float
    total_s: float
    completion_tokens: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Return tokens after the first, per second; 0.0 with fewer than two."""
        return (self.completion_tokens - 1) / self.decode_s if self.completion_tokens > 1 and self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice of a request.

    finish_reason: "stop" (an end token or a stop string), "length" or "cancelled". stop_reason: the stop string or stop
    token id that ended it, None for the model's own end token. token_ids holds every token that contributed, the end
    token excluded.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one prompt; `text`, `token_ids`, `finish_reason` and `logprobs` are the first choice's.

    prompt_logprobs: one entry a prompt token, None for the first (nothing predicts it). seed: the seed used, drawn when
    the caller gave none.
    """

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    usage: Usage
    timings: Timings
    seed: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        """Return the first choice's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the first choice's token ids."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Return why the first choice ended."""
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Return the first choice's log-probabilities, when asked for."""
        return self.completions[0].logprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of a stream: what choice `index` gained. The last piece of a choice has a finish_reason; the last piece of
    all carries the whole `result`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    result: Result | None = field(default=None, repr=False)
