"""Rope tables: cos and sin of every position, made once on the host for the longest context the engine will hold.

The two rules that depend on a length (dynamic, longrope) take that context as the length, so cached keys never go stale.
Frequencies and angles are rounded to float32 where the reference rounds them: at position 100,000 a frequency's last bit
moves the angle by 0.01.

Source: Su et al. 2021; Peng et al. 2023 (yarn); Ding et al. 2024 (longrope); the llama3 rule of Llama 3.1's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale.config.spec import RopeSpec

F32 = NDArray[np.float32]

_TABLE_ROWS = 4096  # positions of the table made at a time


def rope_table(spec: RopeSpec, max_context: int) -> F32:
    """Return the table (max_context, dim) float32: cos of dim/2 frequencies, then sin."""
    frequency, factor = frequencies(spec, max_context)
    half = spec.dim // 2
    table = np.empty((max_context, spec.dim), np.float32)
    for start in range(0, max_context, _TABLE_ROWS):
        position = np.arange(start, min(start + _TABLE_ROWS, max_context), dtype=np.float32)
        angle = (position[:, None] * frequency[None, :]).astype(np.float64)
        table[start : start + len(position), :half] = np.cos(angle).astype(np.float32) * np.float32(factor)
        table[start : start + len(position), half:] = np.sin(angle).astype(np.float32) * np.float32(factor)
    return table


def frequencies(spec: RopeSpec, max_context: int) -> tuple[F32, float]:
    """Return (frequencies (dim/2,) float32, the factor on cos and sin) for a context of `max_context` tokens."""
    return _KINDS[spec.kind](spec, max_context)


def _plain(spec: RopeSpec, theta: float) -> F32:
    """Return theta^(-2i/dim)."""
    return (np.float32(1) / _powers(spec, theta)).astype(np.float32)


def _powers(spec: RopeSpec, theta: float) -> F32:
    exponent = np.arange(0, spec.dim, 2).astype(np.float32) / np.float32(spec.dim)
    return np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


def _default(spec: RopeSpec, max_context: int) -> tuple[F32, float]:
    return _plain(spec, spec.theta), 1.0


def _linear(spec: RopeSpec, max_context: int) -> tuple[F32, float]:
    return _plain(spec, spec.theta) / np.float32(spec.factor), 1.0


def _dynamic(spec: RopeSpec, max_context: int) -> tuple[F32, float]:
    length = max(max_context, spec.max_position)
    stretch = spec.factor * length / spec.max_position - (spec.factor - 1)
    theta = spec.theta * stretch ** (spec.dim / (spec.dim - 2)) if spec.dim > 2 else spec.theta
    return _plain(spec, theta), 1.0


def _llama3(spec: RopeSpec, max_context: int) -> tuple[F32, float]:
    plain = _plain(spec, spec.theta)
    wave = (np.float32(2 * math.pi) / plain).astype(np.float32)
    longest, shortest = spec.original / spec.low_freq_factor, spec.original / spec.high_freq_factor
    smooth = (np.float32(spec.original) / wave - np.float32(spec.low_freq_factor)) / np.float32(
        spec.high_freq_factor - spec.low_freq_factor
    )
    slow = plain / np.float32(spec.factor)
    blended = (np.float32(1) - smooth) * slow + smooth * plain
    return np.where(wave < shortest, plain, np.where(wave > longest, slow, blended)).astype(np.float32), 1.0


def _yarn(spec: RopeSpec, max_context: int) -> tuple[F32, float]:
    def correction(turns: float) -> float:
        return spec.dim * math.log(spec.original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = correction(spec.beta_fast), correction(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(spec.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    plain = _plain(spec, spec.theta)
    slow = (np.float32(1) / (np.float32(spec.factor) * _powers(spec, spec.theta))).astype(np.float32)
    keep = (np.float32(1) - ramp).astype(np.float32)
    return (slow * (np.float32(1) - keep) + plain * keep).astype(np.float32), _yarn_factor(spec)


def _yarn_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def _longrope(spec: RopeSpec, max_context: int) -> tuple[F32, float]:
    divisors = spec.long_factor if max_context > spec.original else spec.short_factor
    factor = spec.attention_factor
    if factor is None:
        factor = 1.0 if spec.factor <= 1 else math.sqrt(1 + math.log(spec.factor) / math.log(spec.original))
    return _divided(spec, divisors), factor


def _factors(spec: RopeSpec, max_context: int) -> tuple[F32, float]:
    return _divided(spec, spec.short_factor), 1.0


def _divided(spec: RopeSpec, divisors: tuple[float, ...]) -> F32:
    return (np.float32(1) / (np.asarray(divisors, np.float32) * _powers(spec, spec.theta))).astype(np.float32)


_KINDS: dict[str, Callable[[RopeSpec, int], tuple[Any, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
