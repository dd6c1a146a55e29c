"""Sampling on the CPU: published Philox vectors, the right distribution, both ways to draw, and any batch alike."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import numpy as np
import pytest

from metrale.backends.base import FIELD, Backend
from metrale.backends.cpu.backend import CpuBackend
from metrale.backends.reference import choosing
from metrale.backends.reference.backend import ReferenceBackend
from tests.helpers import HostRows, down, poisoned, up

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 40.0},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 2.0, "top_k": 3000},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.6},
    {"temperature": 30.0, "top_p": 0.97},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 9.0, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 20.0, "top_k": 4000, "top_p": 0.95, "min_p": 0.5},
    {"temperature": 0.0},
]


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuBackend]:
    opened = CpuBackend(threads=2)
    yield opened
    opened.close()


def rows_of(settings: list[dict], *, seed: int = 0) -> HostRows:
    rows = HostRows(len(settings), max_blocks=1, max_tokens=4)
    for row, setting in enumerate(settings):
        plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "choice": row % 3, "seed": seed + 7919 * (row + 1) + (row << 40)}
        rows.set(row, **(plain | setting))
    return rows


def draw(b: Backend, logits: np.ndarray, rows: HostRows, seq: np.ndarray, index: np.ndarray) -> np.ndarray:
    ids, space = poisoned(b, len(seq), dtype="i32"), poisoned(b, *logits.shape, dtype="f32")
    b.stream.ops.sample(ids, up(b, logits, "f32"), up(b, seq), up(b, index), rows.upload(b), space)
    return down(b, ids)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter: tuple, key: tuple, words: tuple) -> None:
    from numba import njit

    from metrale.backends.cpu.kernels.sample import _philox

    @njit
    def run(numbers):  # the kernel's helper has no Python entry point of its own
        return _philox(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5])

    assert tuple(int(w) for w in run(np.array([*counter, *key], np.uint64))) == words
    assert tuple(choosing.philox(np.array([counter], np.uint32), key)[0]) == words


@pytest.mark.parametrize("vocab", [1, 5, 83, 512, 515, 5000])
def test_draws_equal_the_reference(cpu: CpuBackend, vocab: int) -> None:
    """Small and large sets of survivors, with bans, ties and NaN among the logits."""
    reference = ReferenceBackend()
    rng = np.random.default_rng(vocab)
    count = len(SETTINGS)
    for turn in range(6):
        logits = (rng.standard_normal((count, vocab)) * 3).astype(np.float32)
        if turn % 2:
            logits = np.round(logits)  # many ties
        logits[:, :: 2 + turn][rng.random((count, len(range(0, vocab, 2 + turn)))) < 0.2] = [-np.inf, np.nan][turn % 2]
        seq, index = rng.permutation(count), rng.integers(0, 99, count)
        rows = rows_of(SETTINGS, seed=turn)
        np.testing.assert_array_equal(draw(cpu, logits, rows, seq, index), draw(reference, logits, rows, seq, index))


def test_infinite_logits(cpu: CpuBackend) -> None:
    logits = np.zeros((len(SETTINGS), 700), np.float32)
    logits[:, [650, 20, 400]] = np.inf
    rows = rows_of(SETTINGS)
    got = draw(cpu, logits, rows, np.arange(len(SETTINGS)), np.zeros(len(SETTINGS), int))
    np.testing.assert_array_equal(got, 20)
    logits[:] = -np.inf
    assert not draw(cpu, logits, rows, np.arange(len(SETTINGS)), np.zeros(len(SETTINGS), int)).any()


def test_ties_at_the_edge_of_top_p_go_to_the_lowest_ids(cpu: CpuBackend) -> None:
    """Eight equal tokens and top_p 0.5: the four with the lowest ids, whatever lies between them."""
    logits = np.full((1, 600), -30, np.float32)
    places = np.array([17, 3, 512, 90, 555, 201, 64, 599])
    logits[0, places] = 2.0
    rows = rows_of([{"temperature": 1.0, "top_p": 0.5}])
    drawn = {int(draw(cpu, logits, rows, np.array([0]), np.array([i]))[0]) for i in range(150)}
    assert drawn == set(np.sort(places)[:4].tolist())
    rows = rows_of([{"temperature": 1.0, "top_k": 3}])
    drawn = {int(draw(cpu, logits, rows, np.array([0]), np.array([i]))[0]) for i in range(100)}
    assert drawn == set(np.sort(places)[:3].tolist())


@pytest.mark.parametrize("setting", [{"temperature": 0.7}, {"temperature": 0.7, "top_k": 12},
                                     {"temperature": 1.3, "top_p": 0.8}])
def test_frequencies_follow_the_probabilities(cpu: CpuBackend, setting: dict) -> None:
    rng = np.random.default_rng(11)
    row = rng.standard_normal(20).astype(np.float32)
    scaled = row.astype(np.float64) / setting["temperature"]
    kept = choosing.filtered(scaled, setting.get("top_k", 0), setting.get("top_p", 1.0), 0.0)
    p = np.zeros(20)
    p[kept] = np.exp(scaled[kept])
    p /= p.sum()
    rows, counts, calls = rows_of([setting] * 64), np.zeros(20), 120
    for index in range(calls):
        ids = draw(cpu, np.tile(row, (64, 1)), rows, np.arange(64), np.full(64, index))
        counts += np.bincount(ids, minlength=20)
    assert not counts[p == 0].any()
    expected = calls * 64 * p[p > 0]
    chi2 = ((counts[p > 0] - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)


def test_a_seed_draws_the_same_in_any_batch(cpu: CpuBackend) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((len(SETTINGS), 1500)).astype(np.float32) * 2
    rows, index = rows_of(SETTINGS), rng.integers(0, 50, len(SETTINGS))
    together = draw(cpu, logits, rows, np.arange(len(SETTINGS)), index)
    for t in range(len(SETTINGS)):
        assert draw(cpu, logits[t : t + 1], rows, np.array([t]), index[t : t + 1])[0] == together[t]


@pytest.mark.parametrize("vocab", [1, 31, 511, 513, 4099])
def test_argmax(cpu: CpuBackend, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal((40, vocab)) * 2).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = np.nan
    logits[0], logits[1], logits[2] = np.nan, -np.inf, [-0.0 if i % 2 == 0 else 0.0 for i in range(vocab)]
    ids = poisoned(cpu, 40, dtype="i32")
    cpu.stream.ops.argmax(ids, up(cpu, logits, "f32"))
    np.testing.assert_array_equal(down(cpu, ids), [choosing.best(row) for row in logits])


def test_kernels_know_the_places_of_the_fields() -> None:
    """Kernel files are self-contained, so each repeats the places it uses."""
    names = {"rows": ("TOKEN", "INDEX", "LIMIT", "FLAG", "DELTA"),
             "penalize": ("REPETITION", "PRESENCE", "FREQUENCY", "PROMPT_LEN", "NUM_BIAS"),
             "sample": ("SEED_LO", "SEED_HI", "CHOICE", "TEMPERATURE", "TOP_K", "TOP_P", "MIN_P"), "logprobs": ("LOGPROBS",)}
    for file, fields in names.items():
        module = importlib.import_module(f"metrale.backends.cpu.kernels.{file}")
        assert {name: getattr(module, name) for name in fields} == {name: FIELD[name.lower()] for name in fields}
