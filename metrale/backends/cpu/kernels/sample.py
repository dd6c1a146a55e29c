"""Argmax and sampling: filters without sorting, then Gumbel-max over Philox counters (Numba).

The whole row is read by vector loops only: for its maximum, for the threshold below which no token can pass the filters,
and for the ids above it. What is left is small; exact float64 work (selection, logarithms) is done there alone. Token ids
decide ties, so the order in which a selection leaves its candidates does not enter the draw.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Places in ROW_FIELDS; a test compares them.
SEED_LO, SEED_HI, CHOICE, TEMPERATURE, TOP_K, TOP_P, MIN_P = 5, 6, 7, 8, 9, 10, 11
LEAST_KEY = -(1 << 31)
SPAN = 512  # tokens of which one maximum is taken, and whose noise is made at a time
FEW = 1024  # candidates that are scored one by one
M0, M1, W0, W1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57), np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
FOUR, SIX, EIGHT = np.uint64(4), np.uint64(6), np.uint64(8)
DRAW = np.uint64(0)  # the purpose of the noise of a draw
LN2 = 0.6931471805599453
# Helpers are inlined; without entry points of their own they compile in half the time.
HELPER: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@intrinsic
def _pointer(_context, _word):
    """Turn an int64 into a pointer."""
    return types.voidptr(types.int64), lambda _c, builder, _s, args: builder.inttoptr(args[0], cgutils.voidptr_t)


@intrinsic
def _bits(_context, _value):
    """Return the bits of a float32 as int32."""
    return types.int32(types.float32), lambda c, builder, _s, args: builder.bitcast(args[0], c.get_value_type(types.int32))


@intrinsic
def _float(_context, _value):
    """Return the float32 of 32 bits."""
    return types.float32(types.int32), lambda c, builder, _s, args: builder.bitcast(args[0], c.get_value_type(types.float32))


# --- the largest -----------------------------------------------------------------------------------------------------


@njit(**HELPER)
def _key(value):
    """Return an int32 in the order of the floats: zeros equal, NaN least."""
    bits = _bits(value + np.float32(0))
    key = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.int32(LEAST_KEY) if np.int32(bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000) else key


@njit(**HELPER)
def _best(logits):
    """Return the id of the largest logit (the lowest of equals), -1 when all are NaN or -inf."""
    vocab = logits.shape[0]
    best, place = _key(np.float32(-np.inf)), -1
    for start in range(0, vocab, SPAN):
        top = np.int32(LEAST_KEY)
        for i in range(start, min(start + SPAN, vocab)):
            key = _key(logits[np.uint64(i)])
            top = key if key > top else top
        if top > best:
            best, place = top, start
    if place < 0:
        return -1
    while _key(logits[place]) != best:
        place += 1
    return place


def argmax(args: Any, tile: int, tiles: int) -> int:
    """Choose the largest of each row. Words: 0 ids, 1 logits, 2 row stride, 3 T, 4 V. A tile is a range of rows."""
    words = carray(args, (5,), np.int64)
    rows = words[3]
    ids = carray(_pointer(words[0]), (rows,), np.int32)
    for t in range(rows * tile // tiles, rows * (tile + 1) // tiles):
        ids[t] = max(0, _best(carray(_pointer(words[1] + 4 * t * words[2]), (words[4],), np.float32)))
    return 0


# --- passes over the whole row -----------------------------------------------------------------------------------------


@njit(**HELPER)
def _count(logits, least):
    """Count the logits that are at least `least`."""
    count = np.int32(0)
    for i in range(logits.shape[0]):
        count += np.int32(1) if logits[i] >= least else np.int32(0)
    return count


@njit(**HELPER)
def _gather(logits, least, below, ids, count):
    """Append to ids[:count) those of the finite or larger logits in [least, below); return how many there are."""
    vocab = logits.shape[0]
    least = max(least, np.float32(-3.4028234663852886e38))
    for start in range(0, vocab, 64):
        stop = min(start + 64, vocab)
        found = np.int32(0)
        for i in range(start, stop):
            found += np.int32(1) if logits[np.uint64(i)] >= least else np.int32(0)
        if found:
            for i in range(start, stop):
                if logits[i] >= least and (logits[i] < below or below == np.float32(np.inf)):
                    ids[count] = np.int32(i)
                    count += 1
    return count


@njit(**HELPER, fastmath={"reassoc", "contract", "nsz"})
def _masses(logits, top, rate):
    """Return the sums of exp((logit - top) * rate): of all, and of those from 2^-3, 2^-6, 2^-10 and 2^-16 on.

    Good to 1e-5; the edge of a filter is found from exact terms.
    """
    total = m3 = m6 = m10 = m16 = np.float32(0)
    for i in range(logits.shape[0]):
        x = (logits[i] - top) * rate
        seen = x >= np.float32(-80)
        y = x if seen else np.float32(-80)
        shifted = y * np.float32(1.44269504088896341) + np.float32(12582912)
        n = np.float32(np.int32(_bits(shifted) - np.int32(0x4B400000)))
        r = y - n * np.float32(0.6931471805599453)
        p = np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        p = p * r * r + r + np.float32(1)
        e = _float(np.int32(_bits(p) + np.int32(np.int32(_bits(shifted) - np.int32(0x4B400000)) << np.int32(23))))
        e = e if seen else np.float32(0)
        total += e
        m3 += e if e >= np.float32(2.0**-3) else np.float32(0)
        m6 += e if e >= np.float32(2.0**-6) else np.float32(0)
        m10 += e if e >= np.float32(2.0**-10) else np.float32(0)
        m16 += e if e >= np.float32(2.0**-16) else np.float32(0)
    return total, m3, m6, m10, m16


# --- the candidates ------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def _before(logits, a, b):
    """Say whether id a comes before id b: the larger logit first, then the lower id."""
    return logits[a] > logits[b] or (logits[a] == logits[b] and a < b)


@njit(**HELPER)
def _last(logits, ids, count):
    """Return the id that comes behind all others of ids[:count)."""
    last = np.int64(ids[0])
    for i in range(1, count):
        last = np.int64(ids[i]) if _before(logits, last, np.int64(ids[i])) else last
    return last


@njit(**HELPER)
def _weight(logit, top, temperature):
    """Return the probability relative to the best token's; 1 at temperature 0."""
    if logit == top or temperature == 0:
        return 1.0
    return math.exp(np.float64(logit) / temperature - np.float64(top) / temperature)


@njit(**HELPER)
def _select(logits, ids, low, high, top, temperature, mass, target):
    """Move the fewest first of ids[low:high) whose weights, with `mass`, reach `target` to the front; return their end.

    Temperature 0 gives every token weight 1. Quickselect: only the side of the pivot that holds the end is looked at again;
    pivots come from a linear congruence, so that no pattern of logits makes it slow.
    """
    state = np.uint64(1)
    while low < high:
        state = (state * np.uint64(1664525) + np.uint64(1013904223)) & LOW
        middle = low + np.int64(state >> np.uint64(8)) % (high - low)
        ids[middle], ids[high - 1] = ids[high - 1], ids[middle]
        pivot, place, left = np.int64(ids[high - 1]), low, mass
        for i in range(low, high - 1):
            token = np.int64(ids[i])
            if _before(logits, token, pivot):
                ids[i], ids[place] = ids[place], ids[i]
                place += 1
                left += _weight(logits[token], top, temperature)
        ids[place], ids[high - 1] = ids[high - 1], ids[place]
        if place > low and left >= target:
            high = place
            continue
        mass = left + _weight(logits[pivot], top, temperature)
        low = place + 1
        if mass >= target:
            break
    return low


@njit(**HELPER)
def _filter(logits, ids, top, temperature, top_k, top_p, min_p):
    """Write the ids that top-k and top-p leave (min-p is applied by `_draw`); return how many."""
    least, sure, rest = np.float32(-np.inf), np.float32(np.inf), 0.0
    if top_k > 0:
        distance = np.float32(1)  # doubled until enough tokens lie within it
        while distance < np.float32(1e6) and least == np.float32(-np.inf) and top < np.float32(np.inf):
            if _count(logits, top - distance) >= top_k:
                least = top - distance
            distance *= np.float32(2)
    elif top_p < 1 and top < np.float32(np.inf):
        total, m3, m6, m10, m16 = _masses(logits, top, np.float32(1.0 / temperature))
        for mass, power in ((m3, 3.0), (m6, 6.0), (m10, 10.0), (m16, 16.0)):
            edge = np.float32(top - temperature * power * LN2)
            if mass >= (top_p + 1e-4) * total:
                least = edge
                rest = np.float64(total) - np.float64(mass)
                break
            if mass < (top_p - 1e-4) * total:
                sure = edge  # all above it are in
    elif min_p > 0 and top < np.float32(np.inf):
        least = np.float32(top + temperature * (math.log(min_p) - 1e-3) - 1e-6 * abs(top))
    known = np.int64(0)
    if sure < np.float32(np.inf):
        known = _gather(logits, sure, np.float32(np.inf), ids, known)
    count = _gather(logits, least, sure, ids, known)
    if 0 < top_k < count:
        count = _select(logits, ids, np.int64(0), count, top, 0.0, 0.0, np.float64(top_k))
    if top_p < 1:
        mass = 0.0
        for i in range(known):
            mass += _weight(logits[ids[i]], top, temperature)
        total = mass + rest
        for i in range(known, count):
            total += _weight(logits[ids[i]], top, temperature)
        count = max(1, _select(logits, ids, known, count, top, temperature, mass, top_p * total))
    return count


# --- the draw ------------------------------------------------------------------------------------------------------------


@njit(**HELPER, forceinline=True)
def _two_rounds(c0, c1, c2, c3, k0, k1):
    p0, p1 = c0 * M0, c2 * M1
    c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & LOW, (p0 >> HALF) ^ c3 ^ k1, p0 & LOW
    p0, p1 = c0 * M0, c2 * M1
    k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return (p1 >> HALF) ^ c1 ^ k0, p1 & LOW, (p0 >> HALF) ^ c3 ^ k1, p0 & LOW


@njit(**HELPER, forceinline=True)
def _philox(block, place, choice, purpose, k0, k1):
    """Return the four words of Philox4x32-10 for counter (block, place, choice, purpose).

    Written without a loop, so that the loops around it become vector code.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"
    """
    c0, c1, c2, c3 = _two_rounds(np.uint64(block), place, choice, purpose, k0, k1)
    c0, c1, c2, c3 = _two_rounds(c0, c1, c2, c3, (k0 + W0 + W0) & LOW, (k1 + W1 + W1) & LOW)
    c0, c1, c2, c3 = _two_rounds(c0, c1, c2, c3, (k0 + FOUR * W0) & LOW, (k1 + FOUR * W1) & LOW)
    c0, c1, c2, c3 = _two_rounds(c0, c1, c2, c3, (k0 + SIX * W0) & LOW, (k1 + SIX * W1) & LOW)
    return _two_rounds(c0, c1, c2, c3, (k0 + EIGHT * W0) & LOW, (k1 + EIGHT * W1) & LOW)


@njit(**HELPER)
def _gumbel(x):
    """Return -log(-log(u)) for u = (x + 0.5) / 2^32, in float64."""
    return -math.log(-math.log((np.float64(x) + 0.5) * 2.3283064365386963e-10))


@njit(**HELPER)
def _word(words, lane):
    return words[0] if lane == 0 else words[1] if lane == 1 else words[2] if lane == 2 else words[3]


@njit(**HELPER)
def _score(logits, token, temperature, place, choice, k0, k1):
    """Return logit / temperature + noise of one token."""
    x = _word(_philox(token >> 2, place, choice, DRAW, k0, k1), token & 3)
    return np.float64(logits[token]) / temperature + _gumbel(x)


@njit(**HELPER)
def _draw(logits, ids, count, top, temperature, min_p, place, choice, k0, k1):
    """Return the listed token with the largest score."""
    best, chosen = -np.inf, 0
    for i in range(count):
        token = np.int64(ids[i])
        if min_p > 0 and _weight(logits[token], top, temperature) < min_p:
            continue
        score = _score(logits, token, temperature, place, choice, k0, k1)
        if score > best or (score == best and token < chosen):
            best, chosen = score, token
    return chosen


@njit(**HELPER)
def _noise(block, count, place, choice, k0, k1, noise):
    """Write the Philox words of `count` blocks of four tokens."""
    for j in range(count):
        w0, w1, w2, w3 = _philox(block + j, place, choice, DRAW, k0, k1)
        noise[4 * np.uint64(j)] = np.int32(w0)
        noise[4 * np.uint64(j) + np.uint64(1)] = np.int32(w1)
        noise[4 * np.uint64(j) + np.uint64(2)] = np.int32(w2)
        noise[4 * np.uint64(j) + np.uint64(3)] = np.int32(w3)


@njit(**HELPER)
def _hopeful(logit, x, top, rate, gap):
    """Say whether a token can still win: gumbel = -log(-log(u)) <= -log(1 - u), whose exponent alone bounds it."""
    left = np.float32(np.int32(np.int32(~x >> np.int32(1)) & np.int32(0x7FFFFFFF)))
    exponent = np.float32(np.int32(_bits(left) >> np.int32(23)) - np.int32(127))
    return (logit - top) * rate + (np.float32(32) - exponent) * np.float32(LN2) >= gap


@njit(**HELPER)
def _any_hopeful(logits, noise, start, base, count, top, rate, gap):
    found = np.int32(0)
    for i in range(count):
        hit = _hopeful(logits[np.uint64(start + i)], noise[np.uint64(start - base + i)], top, rate, gap)
        found += np.int32(1) if hit else np.int32(0)
    return found


@njit(**HELPER)
def _draw_all(logits, noise, first, edge, temperature, min_p, place, choice, k0, k1):
    """Return the token with the largest score among those not behind the token `edge` (-1: among all).

    `first` is the likeliest token. Noise is made and tested SPAN tokens at a time by vector loops; the few tokens that may
    win are scored exactly.
    """
    vocab, whole, top = logits.shape[0], logits.shape[0] // 4 * 4, logits[first]
    rate, peak = np.float32(1.0 / temperature), np.float64(top) / temperature
    best, chosen = _score(logits, first, temperature, place, choice, k0, k1), np.int64(first)
    for base in range(0, vocab, SPAN):
        end = min(base + SPAN, whole)
        if base < whole:
            _noise(base >> 2, (end - base) >> 2, place, choice, k0, k1, noise)
        for start in range(base, min(base + SPAN, vocab), 64):
            stop = min(start + 64, vocab)
            gap = np.float32(best - peak - 1e-3)
            if stop <= whole and _any_hopeful(logits, noise, start, base, stop - start, top, rate, gap) == 0:
                continue
            for token in range(start, stop):
                value = logits[token]
                if not value > -np.inf or (token < whole and not _hopeful(value, noise[token - base], top, rate, gap)):
                    continue
                if edge >= 0 and token != edge and not _before(logits, token, edge):
                    continue
                if min_p > 0 and _weight(value, top, temperature) < min_p:
                    continue
                score = _score(logits, token, temperature, place, choice, k0, k1)
                if score > best or (score == best and token < chosen):
                    best, chosen = score, np.int64(token)
    return chosen


def sample(args: Any, tile: int, tiles: int) -> int:
    """Choose an id a row.

    Words: 0 ids, 1 logits, 2 row stride, 3 scratch, 4 row stride, 5 seq, 6 index, 7 T, 8 V, 9 state, 10 fields,
    11 fields a row. A tile is a range of rows.
    """
    words = carray(args, (12,), np.int64)
    rows, vocab = words[7], words[8]
    ids = carray(_pointer(words[0]), (rows,), np.int32)
    seq = carray(_pointer(words[5]), (rows,), np.int32)
    index = carray(_pointer(words[6]), (rows,), np.int32)
    for t in range(rows * tile // tiles, rows * (tile + 1) // tiles):
        ids[t] = 0
        if seq[t] < 0:
            continue
        logits = carray(_pointer(words[1] + 4 * t * words[2]), (vocab,), np.float32)
        field = carray(_pointer(words[9] + 4 * (words[10] + seq[t] * words[11])), (words[11],), np.int32)
        number = carray(_pointer(words[9] + 4 * (words[10] + seq[t] * words[11])), (words[11],), np.float32)
        temperature, top_p, min_p = np.float64(number[TEMPERATURE]), np.float64(number[TOP_P]), np.float64(number[MIN_P])
        first = _best(logits)
        if first < 0 or temperature == 0:
            ids[t] = max(0, first)
            continue
        k0, k1 = np.uint64(np.uint32(field[SEED_LO])), np.uint64(np.uint32(field[SEED_HI]))
        place, choice = np.uint64(np.uint32(index[t] + 1)), np.uint64(np.uint32(field[CHOICE]))
        top_k = np.int64(field[TOP_K])
        if top_k >= vocab:
            top_k = 0
        left = carray(_pointer(words[3] + 4 * t * words[4]), (vocab,), np.int32)
        edge, count = -1, 0
        if top_k > 0 or top_p < 1 or min_p > 0:
            count = _filter(logits, left, logits[first], temperature, top_k, top_p, min_p)
            if count <= FEW:
                ids[t] = _draw(logits, left, count, logits[first], temperature, min_p, place, choice, k0, k1)
                continue
            edge = _last(logits, left, count)
        ids[t] = _draw_all(logits, left, first, edge, temperature, min_p, place, choice, k0, k1)
    return 0
