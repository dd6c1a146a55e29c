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
SPAN = 512  # tokens of which one maximum is taken
M0, M1, W0, W1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57), np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
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
def _gather(logits, least, ids):
    """List the ids of the logits that are at least `least` and more than -inf, in ascending order; return how many."""
    vocab, count = logits.shape[0], 0
    least = max(least, np.float32(-3.4028234663852886e38))
    for start in range(0, vocab, 64):
        stop = min(start + 64, vocab)
        found = np.int32(0)
        for i in range(start, stop):
            found += np.int32(1) if logits[np.uint64(i)] >= least else np.int32(0)
        if found:
            for i in range(start, stop):
                if logits[i] >= least:
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
def _partition(logits, ids, low, high):
    """Put ids[low:high) around a pivot, those before it to its left; return its place."""
    middle, last = (low + high) // 2, high - 1
    if _before(logits, ids[middle], ids[low]):
        ids[low], ids[middle] = ids[middle], ids[low]
    if _before(logits, ids[last], ids[middle]):
        ids[middle], ids[last] = ids[last], ids[middle]
        if _before(logits, ids[middle], ids[low]):
            ids[low], ids[middle] = ids[middle], ids[low]
    ids[middle], ids[last] = ids[last], ids[middle]  # the median is the pivot
    pivot, place = ids[last], low
    for i in range(low, last):
        if _before(logits, ids[i], pivot):
            ids[i], ids[place] = ids[place], ids[i]
            place += 1
    ids[place], ids[last] = ids[last], ids[place]
    return place


@njit(**HELPER)
def _keep_first(logits, ids, count, keep):
    """Move the `keep` first of ids[:count) to the front."""
    low, high = 0, count
    while high - low > 1:
        place = _partition(logits, ids, low, high)
        if place == keep or place + 1 == keep:
            return
        if place > keep:
            high = place
        else:
            low = place + 1


@njit(**HELPER)
def _weight(logit, top, temperature):
    """Return the probability relative to the best token's."""
    return 1.0 if logit == top else math.exp(np.float64(logit) / temperature - np.float64(top) / temperature)


@njit(**HELPER)
def _nucleus(logits, ids, count, top, temperature, target):
    """Move the fewest first of ids[:count) whose weights reach `target` to the front; return how many."""
    low, high, mass = 0, count, 0.0
    while low < high:
        place = _partition(logits, ids, low, high)
        left = mass
        for i in range(low, place):
            left += _weight(logits[ids[i]], top, temperature)
        if place > low and left >= target:
            high = place
            continue
        mass = left + _weight(logits[ids[place]], top, temperature)
        low = place + 1
        if mass >= target:
            break
    return low


@njit(**HELPER)
def _threshold_of_count(logits, top, keep):
    """Return a logit that at least `keep` tokens reach (or every token), found by doubling the distance from the best."""
    distance = np.float32(1)
    while distance < np.float32(1e6) and top < np.float32(np.inf):
        if _count(logits, top - distance) >= keep:
            return top - distance
        distance *= np.float32(2)
    return np.float32(-np.inf)


@njit(**HELPER)
def _filter(logits, ids, top, temperature, top_k, top_p, min_p):
    """Write the ids that top-k and top-p leave (min-p is applied by `_draw`); return how many."""
    least, rest = np.float32(-np.inf), 0.0
    if top_k > 0:
        least = _threshold_of_count(logits, top, top_k)
    elif top_p < 1 and top < np.float32(np.inf):
        total, m3, m6, m10, m16 = _masses(logits, top, np.float32(1.0 / temperature))
        need = (top_p + 1e-4) * total
        for mass, power in ((m3, 3.0), (m6, 6.0), (m10, 10.0), (m16, 16.0)):
            if mass >= need:
                least = np.float32(top - temperature * power * LN2)
                rest = np.float64(total) - np.float64(mass)
                break
    elif min_p > 0 and top < np.float32(np.inf):
        least = np.float32(top + temperature * (math.log(min_p) - 1e-3) - 1e-6 * abs(top))
    count = _gather(logits, least, ids)
    if 0 < top_k < count:
        _keep_first(logits, ids, count, top_k)
        count = top_k
    if top_p < 1:
        total = rest
        for i in range(count):
            total += _weight(logits[ids[i]], top, temperature)
        count = _nucleus(logits, ids, count, top, temperature, top_p * total)
    return count


# --- the draw ------------------------------------------------------------------------------------------------------------


@njit(**HELPER)
def _philox(block, place, choice, k0, k1):
    """Return the four words of Philox4x32-10 for counter (block, place, choice, 0).

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"
    """
    c0, c1, c2, c3 = np.uint64(block), place, choice, np.uint64(0)
    for _ in range(10):
        p0, p1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & LOW, (p0 >> HALF) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return c0, c1, c2, c3


@njit(**HELPER)
def _may_win(x, z, best):
    """Say whether z + gumbel can reach `best`: -log(-log(u)) <= -log(1 - u), and log2(1 - u) from the exponent alone."""
    left = np.float32(LOW - x) + np.float32(0.5)
    exponent = np.int32(np.int32(_bits(left) >> np.int32(23)) - np.int32(127))
    return z + (33 - exponent) * LN2 >= best


@njit(**HELPER)
def _gumbel(x):
    """Return -log(-log(u)) for u = (x + 0.5) / 2^32, in float64."""
    return -math.log(-math.log((np.float64(x) + 0.5) * 2.3283064365386963e-10))


@njit(**HELPER)
def _word(words, lane):
    return words[0] if lane == 0 else words[1] if lane == 1 else words[2] if lane == 2 else words[3]


@njit(**HELPER)
def _draw(logits, ids, count, top, temperature, min_p, place, choice, k0, k1):
    """Return the candidate with the largest logit / temperature + noise."""
    best, chosen = -np.inf, 0
    for i in range(count):
        token = ids[i]
        if min_p > 0 and _weight(logits[token], top, temperature) < min_p:
            continue
        z = np.float64(logits[token]) / temperature
        x = _word(_philox(token >> 2, place, choice, k0, k1), token & 3)
        if _may_win(x, z, best):
            score = z + _gumbel(x)
            if score > best or (score == best and token < chosen):
                best, chosen = score, token
    return chosen


@njit(**HELPER)
def _draw_all(logits, first, temperature, place, choice, k0, k1):
    """Return the token with the largest logit / temperature + noise; `first` is the likeliest one."""
    vocab = logits.shape[0]
    rate = 1.0 / temperature
    best = np.float64(logits[first]) / temperature + _gumbel(_word(_philox(first >> 2, place, choice, k0, k1), first & 3))
    chosen = first
    for block in range((vocab + 3) // 4):
        start, stop = 4 * block, min(4 * block + 4, vocab)
        z = np.float64(-np.inf)
        for token in range(start, stop):
            z = logits[token] * rate if logits[token] * rate > z else z
        if not z + 23 >= best:
            continue  # no noise is larger than 22.88
        words = _philox(block, place, choice, k0, k1)
        for token in range(start, stop):
            z = np.float64(logits[token]) / temperature
            if z > -np.inf and _may_win(_word(words, token - start), z, best):
                score = z + _gumbel(_word(words, token - start))
                if score > best or (score == best and token < chosen):
                    best, chosen = score, token
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
        if top_k <= 0 and top_p >= 1 and min_p <= 0:
            ids[t] = _draw_all(logits, first, temperature, place, choice, k0, k1)
            continue
        left = carray(_pointer(words[3] + 4 * t * words[4]), (vocab,), np.int32)
        count = _filter(logits, left, logits[first], temperature, top_k, top_p, min_p)
        ids[t] = _draw(logits, left, count, logits[first], temperature, min_p, place, choice, k0, k1)
    return 0
