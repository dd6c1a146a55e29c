"""StepPlan and StepResult: what the engine asks of the model and what it gets back, as plain data.

No pointers, no arrays: every class here turns into JSON and back (`to_json`, `from_json`), so every rank can run the same
plan and a recorded log of plans replays a run. Floats survive the round trip because JSON keeps Python's shortest form.

A sequence's *tokens* are its prompt and everything generated since. Token `i` has *index* `i`. Feeding the token at
index `i` writes its K/V and yields the token at index `i + 1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

OUT_OF_ROOM = 1  # flag bit of a row state: the row had no block for its token and wrote nothing


@dataclass(frozen=True, slots=True)
class Bias:
    """One logit-bias entry of a row: add `value` to `token` (-inf bans it) while the chosen index is below `until`."""

    token: int
    value: float
    until: int


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row chooses its tokens; `sampler.row_sampling` makes one from SamplingParams.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition 1, presence 0 and frequency 0 are off. `seed` is
    unsigned 64-bit and always present. `choice` is which of n. `logprobs` None: not wanted; k: the chosen token's and the
    k best.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    choice: int = 0
    bias: tuple[Bias, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A sequence to allocate.

    tokens: all tokens known now, at least one: the prompt, or prompt and output of a request that is run again.
    prompt_len: how many of them are the prompt (presence and frequency count what comes after).
    prompt_logprobs: None, or k: log-probabilities of the prompt's tokens and the k best at each place.
    """

    seq_id: int
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: RowSampling
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence to make from a prefilled one, sharing its full K/V blocks: the other choices of n > 1.

    The new sequence holds the parent's tokens [0, at]; its next decode step feeds the token at index `at`. For another
    choice over the same prompt, `at` is the prompt length less one: that token is fed again, and the row draws with its
    own `sampling`.
    """

    parent_id: int
    seq_id: int
    at: int
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of a sequence to prefill; chunks of a sequence follow one another without gaps.

    The chunk with ``stop == len(tokens)`` is the last: it yields the sequence's next token, and the sequence may then
    be decoded.
    """

    seq_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, run in the order of the fields: retire, admit, forks, chunks, decode.

    `decode` names the sequences of the decode batch in row order, each once, each prefilled (possibly by this plan).
    """

    step: int
    retire: tuple[int, ...] = ()
    admit: tuple[SequenceSpec, ...] = ()
    forks: tuple[Fork, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepPlan:
        """Return the plan that `to_json` (and a trip through JSON text) came from."""
        return cls(
            step=int(data["step"]),
            retire=tuple(data["retire"]),
            admit=tuple(_spec(s) for s in data["admit"]),
            forks=tuple(_fork(f) for f in data["forks"]),
            chunks=tuple(Chunk(**c) for c in data["chunks"]),
            decode=tuple(data["decode"]),
        )


@dataclass(frozen=True, slots=True)
class TokenResult:
    """A token a sequence has got: its id, its index in the token list, and what was asked about it.

    logprob: natural-log probability under the model's own distribution (before penalties, bias and temperature), None
    when not asked for. top: (token, logprob) of the k best, best first, ties to the lower id. finite: False when there
    was nothing to choose from because the row's logits are NaN.
    """

    seq_id: int
    index: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finite: bool = True


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The log-probability of one prompt token given those before it; index 0 has none and is not reported."""

    seq_id: int
    index: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A part of the plan that did not happen: the sequences it was for and the error's class name, code and sentence.

    The part changed nothing that the host knows of: it may be tried again. `part`: "retire", "admit", "fork", "chunk"
    or "decode".
    """

    part: str
    seq_ids: tuple[int, ...]
    error: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step yielded: tokens in plan order (chunks, then decode rows), prompt logprobs, and the parts that failed."""

    step: int
    tokens: tuple[TokenResult, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    failures: tuple[StepFailure, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepResult:
        """Return the result that `to_json` (and a trip through JSON text) came from."""
        return cls(
            step=int(data["step"]),
            tokens=tuple(TokenResult(**_top(t)) for t in data["tokens"]),
            prompt_logprobs=tuple(PromptLogprob(**_top(p)) for p in data["prompt_logprobs"]),
            failures=tuple(StepFailure(**{**f, "seq_ids": tuple(f["seq_ids"])}) for f in data["failures"]),
        )


def _sampling(data: Mapping[str, Any]) -> RowSampling:
    return RowSampling(**{**data, "bias": tuple(Bias(**b) for b in data["bias"])})


def _spec(data: Mapping[str, Any]) -> SequenceSpec:
    return SequenceSpec(**{**data, "tokens": tuple(data["tokens"]), "sampling": _sampling(data["sampling"])})


def _fork(data: Mapping[str, Any]) -> Fork:
    return Fork(**{**data, "sampling": _sampling(data["sampling"])})


def _top(data: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, "top": tuple((int(i), float(v)) for i, v in data["top"])}
