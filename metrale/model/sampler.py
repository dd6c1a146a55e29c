"""From SamplingParams to a row's words: what the device's sampler reads.

Whatever a request asks for becomes row data, so that a captured step serves any mix of requests: `min_tokens`, bad tokens
and logit bias are entries of one table, each with the index until which it applies.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable

from metrale.backends.base import MAX_BIAS, MAX_TOP_LOGPROBS, ROW_FIELDS
from metrale.config.sampling import SamplingParams
from metrale.errors import RequestError
from metrale.model.plan import Bias, RowSampling

FOREVER = 2**31 - 1
_FLOATS = frozenset({"temperature", "top_p", "min_p", "repetition", "presence", "frequency"})


def draw_seed() -> int:
    """Return a fresh unsigned 64-bit seed; whoever draws one reports it."""
    return secrets.randbits(64)


def row_sampling(
    params: SamplingParams, *, prompt_len: int, eos_ids: Iterable[int], seed: int | None = None, choice: int = 0
) -> RowSampling:
    """Return how a row of this request chooses.

    seed: used when the parameters bring none; drawn when there is none either (read it off the result to report it).
    eos_ids: the model's own end ids; with `min_tokens` they and the stop ids are banned until so many tokens exist.
    Raises: RequestError (``sampling.logit_bias``) for more than MAX_BIAS entries altogether.
    """
    bias = [Bias(int(token), float(value), FOREVER) for token, value in sorted(params.logit_bias.items())]
    bias += [Bias(int(token), float("-inf"), FOREVER) for token in params.bad_token_ids]
    if params.min_tokens > 0:
        ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {*eos_ids})
        bias += [Bias(token, float("-inf"), prompt_len + params.min_tokens) for token in sorted(ends)]
    if len(bias) > MAX_BIAS:
        raise RequestError(
            f"logit_bias: expected at most {MAX_BIAS} entries with bad tokens and, under min_tokens, end ids, got "
            f"{len(bias)}; drop some",
            code="sampling.logit_bias",
        )
    chosen = params.seed if params.seed is not None else seed
    return RowSampling(
        temperature=float(params.temperature),
        top_k=params.top_k,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition=float(params.repetition_penalty),
        presence=float(params.presence_penalty),
        frequency=float(params.frequency_penalty),
        seed=draw_seed() if chosen is None else chosen,
        choice=choice,
        bias=tuple(bias),
        logprobs=params.logprobs,
    )


def float_bits(value: float) -> int:
    """Return the bits of a float32 as a signed 32-bit integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def signed(word: int) -> int:
    """Return the low 32 bits of a number as a signed 32-bit integer."""
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def field_words(sampling: RowSampling, *, token: int, index: int, limit: int, prompt_len: int) -> list[int]:
    """Return a row's words in the order of ROW_FIELDS; floats as their bits."""
    values: dict[str, float] = {
        "token": token,
        "index": index,
        "limit": limit,
        "flag": 0,
        "delta": 0,
        "seed_lo": signed(sampling.seed),
        "seed_hi": signed(sampling.seed >> 32),
        "choice": sampling.choice,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition": sampling.repetition,
        "presence": sampling.presence,
        "frequency": sampling.frequency,
        "prompt_len": prompt_len,
        "num_bias": len(sampling.bias),
        "logprobs": -1 if sampling.logprobs is None else min(sampling.logprobs, MAX_TOP_LOGPROBS),
    }
    return [float_bits(values[name]) if name in _FLOATS else int(values[name]) for name in ROW_FIELDS]
