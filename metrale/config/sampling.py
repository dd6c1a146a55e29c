"""`SamplingParams`: how one request chooses its tokens, and the one validator of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from metrale.config.files import GenerationDefaults
from metrale.errors import RequestError

MAX_LOGPROBS = 20
MAX_BIAS_ENTRIES = 300  # what the OpenAI API allows; end ids banned by min_tokens need room beside them
MAX_N = 128
SEED_LIMIT = 2**64
MAX_COUNT = 2**30  # of top_k and min_tokens: row words have 32 bits, and an index is added to min_tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request chooses its tokens.

    temperature: 0 takes the most likely token. top_k: keep the k best (0: all). top_p: keep the smallest set of best
    tokens that holds this much probability (1: all). min_p: keep tokens at least this likely relative to the best (0:
    all). repetition_penalty: divides positive and multiplies negative logits of tokens seen, prompt included (1: off).
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, from tokens generated (0: off).
    logit_bias: token id -> added to its logit. seed: None draws one and reports it. stop: strings that end the text and
    are not part of it. stop_token_ids: ids that end it, beside the model's own. min_tokens: no end before this many.
    max_tokens: None goes on to the end of the context. ignore_eos: the model's own end ids do not end it.
    bad_token_ids: never chosen. logprobs: report the chosen token's log-probability and this many best (None: none).
    prompt_logprobs: the same for the prompt's tokens. n: choices, each with its own text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    bad_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        """Accept a single string or any sequence where tuples are kept; values are judged by `validate`."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple(stop))
        object.__setattr__(self, "stop_token_ids", _tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_token_ids", _tuple(self.bad_token_ids))
        object.__setattr__(self, "logit_bias", {} if self.logit_bias is None else self.logit_bias)

    @classmethod
    def from_generation(cls, defaults: GenerationDefaults, **given: Any) -> SamplingParams:
        """Return parameters from a checkpoint's defaults, overridden by what is given and not None.

        A checkpoint that says do_sample = false is greedy unless a temperature is given.
        """
        base = cls()
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        found = {name: getattr(defaults, name) for name in names if getattr(defaults, name) is not None}
        if defaults.do_sample is False:
            found["temperature"] = 0.0
        found.update({key: value for key, value in given.items() if value is not None})
        return replace(base, **found)

    @property
    def greedy(self) -> bool:
        """Say whether the most likely token is always taken."""
        return self.temperature == 0

    def problems(self, *, vocab: int | None = None, max_context: int | None = None) -> list[RequestError]:
        """Return every contradiction as an error with its code, one sentence each; empty when valid.

        vocab: token ids are checked against it when given. max_context: bounds max_tokens when given.
        """
        found = [*_numbers(self), *_lengths(self, max_context), *_tokens(self, vocab), *_texts(self)]
        return [RequestError(f"{name}: {text}", code=f"sampling.{name}") for name, text in found]

    def validate(self, *, vocab: int | None = None, max_context: int | None = None) -> SamplingParams:
        """Return self, or raise one RequestError that lists every contradiction and has the first one's code."""
        found = self.problems(vocab=vocab, max_context=max_context)
        if found:
            raise RequestError("; ".join(str(error) for error in found), code=found[0].code)
        return self


Problem = tuple[str, str]


def _tuple(value: Any) -> Any:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(p: SamplingParams) -> Iterator[Problem]:
    ranges: tuple[tuple[str, float, float, bool], ...] = (
        ("temperature", 0.0, 100.0, False),
        ("top_p", 0.0, 1.0, True),
        ("min_p", 0.0, 1.0, False),
        ("repetition_penalty", 0.0, 100.0, True),
        ("presence_penalty", -2.0, 2.0, False),
        ("frequency_penalty", -2.0, 2.0, False),
    )
    for name, low, high, above in ranges:
        value = getattr(p, name)
        if not _is_number(value) or not low <= value <= high or (above and value == low):
            bound = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            yield name, f"expected a number {bound}, got {value!r}; leave it out to turn it off"
    if not _is_int(p.top_k) or not 0 <= p.top_k <= MAX_COUNT:
        yield "top_k", f"expected an integer from 0 to {MAX_COUNT}, got {p.top_k!r}; 0 keeps all tokens"
    if p.seed is not None and not (_is_int(p.seed) and 0 <= p.seed < SEED_LIMIT):
        yield "seed", f"expected an integer from 0 to 2^64 - 1, got {p.seed!r}; leave it out to have one drawn"
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None and not (_is_int(value) and 0 <= value <= MAX_LOGPROBS):
            yield name, f"expected an integer from 0 to {MAX_LOGPROBS}, got {value!r}; leave it out for none"
    if not isinstance(p.ignore_eos, bool):
        yield "ignore_eos", f"expected true or false, got {p.ignore_eos!r}; leave it out for false"


def _lengths(p: SamplingParams, max_context: int | None) -> Iterator[Problem]:
    if p.max_tokens is not None and not (_is_int(p.max_tokens) and p.max_tokens >= 1):
        yield (
            "max_tokens",
            f"expected an integer of at least 1, got {p.max_tokens!r}; leave it out for no limit but the context",
        )
    elif p.max_tokens is not None and max_context is not None and p.max_tokens > max_context:
        yield "max_tokens", f"expected at most the context of {max_context} tokens, got {p.max_tokens}; ask for fewer"
    if not _is_int(p.min_tokens) or not 0 <= p.min_tokens <= MAX_COUNT:
        yield "min_tokens", f"expected an integer from 0 to {MAX_COUNT}, got {p.min_tokens!r}; leave it out for none"
    elif _is_int(p.max_tokens) and p.max_tokens is not None and p.min_tokens > p.max_tokens:
        yield "min_tokens", f"expected at most max_tokens {p.max_tokens}, got {p.min_tokens}; lower it or raise max_tokens"
    if not _is_int(p.n) or not 1 <= p.n <= MAX_N:
        yield "n", f"expected an integer from 1 to {MAX_N}, got {p.n!r}; send several requests"
    elif p.n > 1 and _is_number(p.temperature) and p.temperature == 0:
        yield "n", f"expected 1 at temperature 0, got {p.n}; all choices would be the same text, raise the temperature"


def _tokens(p: SamplingParams, vocab: int | None) -> Iterator[Problem]:
    bias = p.logit_bias
    if not isinstance(bias, Mapping):
        yield "logit_bias", f"expected an object of token id to number, got {bias!r}; write it as {{id: bias}}"
        bias = {}
    for name, ids in (("logit_bias", tuple(bias)), ("stop_token_ids", p.stop_token_ids), ("bad_token_ids", p.bad_token_ids)):
        wrong = next((i for i in ids if not _is_int(i) or i < 0 or (vocab is not None and i >= vocab)), None)
        if wrong is not None:
            bound = "of at least 0" if vocab is None else f"from 0 to {vocab - 1}"
            yield name, f"expected token ids {bound}, got {wrong!r}; use the model's own vocabulary"
    outside = next(((i, v) for i, v in bias.items() if not _is_number(v) or not -100 <= v <= 100), None)
    if outside is not None:
        yield "logit_bias", f"expected values from -100 to 100, got {outside[1]!r} for id {outside[0]!r}; clip it"
    if len(bias) + len(p.bad_token_ids) > MAX_BIAS_ENTRIES:
        total = len(bias) + len(p.bad_token_ids)
        yield "logit_bias", f"expected at most {MAX_BIAS_ENTRIES} entries together with bad_token_ids, got {total}; drop some"
    both = next((i for i in p.bad_token_ids if i in bias), None)
    if both is not None:
        yield "bad_token_ids", f"expected ids without a logit_bias, got {both}, which has one; drop either"
    both = next((i for i in p.bad_token_ids if i in p.stop_token_ids), None)
    if both is not None:
        yield "bad_token_ids", f"expected ids that are not stop_token_ids, got {both}, which is one; drop either"


def _texts(p: SamplingParams) -> Iterator[Problem]:
    if not isinstance(p.stop, tuple) or any(not isinstance(s, str) for s in p.stop):
        yield "stop", f"expected strings, got {p.stop!r}; pass a string or a list of strings"
    elif any(not s for s in p.stop):
        yield "stop", "expected non-empty strings, got an empty one; it would end every text at once, drop it"
