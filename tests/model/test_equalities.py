"""One text, however it is computed: chunks, batches, graphs, threads, moves and copies change nothing.

On the CPU the logits are equal bit for bit. The reference sums with NumPy, whose order depends on shapes: there the tokens
are equal, and the logits to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.model.core import Diagnosis
from metrale.model.plan import Chunk, RowSampling, SequenceSpec
from metrale.model.transformer import TransformerModel
from tests.model import tiny
from tests.model.conftest import OpenBackend

SAMPLED = RowSampling(temperature=0.9, top_k=40, top_p=0.95, seed=2**63 + 11, repetition=1.2, presence=0.3, frequency=0.1)
FORMATS = ("f32", "q8_0")


def same(kind: str, got: Any, want: Any) -> None:
    if kind == "cpu":
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))
    else:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def trace(model: TransformerModel, seq_ids: list[int], steps: int) -> tuple[list[list[int]], Any]:
    """Decode and return each sequence's tokens and every step's logits, (steps, n, V)."""
    logits = []
    for _ in range(steps):
        model.decode_batch(seq_ids)
        logits.append(model.step_logits())
    return tiny.continue_(model, seq_ids, 0), np.array(logits)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [1, 7, 16, 33])
def test_a_prompt_in_chunks_is_the_whole_prompt(device: Backend, kind: str, size: int, fmt: str) -> None:
    model, prompt = tiny.open_model(device, fmt=fmt), tiny.prompt(61)
    tiny.start(model, 1, prompt, SAMPLED)
    whole = model.step_logits()
    model.alloc_sequence(SequenceSpec(2, prompt, len(prompt), SAMPLED))
    for start in range(0, len(prompt), size):
        result = model.prefill_chunk(Chunk(2, start, min(start + size, len(prompt))))
        assert (result is not None) == (start + size >= len(prompt))
    same(kind, model.step_logits(), whole)
    (a, b), _ = trace(model, [1, 2], 20)
    assert a == b


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_continues_what_prefill_would_compute(device: Backend, kind: str, fmt: str) -> None:
    model, prompt = tiny.open_model(device, fmt=fmt), tiny.prompt(13)
    tiny.start(model, 1, prompt)
    _, decoded = trace(model, [1], 30)
    tokens = model.sequence(1).tokens
    same(kind, model.score(tokens[:-1])[13:], decoded[:, 0])


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_graph_computes_what_the_eager_step_does(device: Backend, kind: str, fmt: str) -> None:
    model = tiny.open_model(device, fmt=fmt)
    for i in (1, 2, 3):
        tiny.start(model, i, tiny.prompt(5 * i, i), SAMPLED)
    graph_text, graph_logits = trace(model, [1, 2, 3], 24)
    assert model.stats.graph_replays == 24
    assert model.stats.eager_steps == 0
    for i in (1, 2, 3):
        model.free_sequence(i)
        tiny.start(model, i, tiny.prompt(5 * i, i), SAMPLED)
    model.suppress_graphs("test")
    eager_text, eager_logits = trace(model, [1, 2, 3], 24)
    assert model.stats.eager_steps == 24
    assert graph_text == eager_text
    same(kind, graph_logits, eager_logits)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_batch_of_five_is_five_times_one(device: Backend, kind: str, fmt: str) -> None:
    model = tiny.open_model(device, fmt=fmt)
    samplings = [
        tiny.GREEDY,
        SAMPLED,
        RowSampling(temperature=1.3, seed=5, min_p=0.02),
        tiny.GREEDY,
        RowSampling(temperature=0.5, seed=9),
    ]
    alone = []
    for i, sampling in enumerate(samplings):
        tiny.start(model, i, tiny.prompt(3 + 11 * i, i), sampling)
        alone.append(trace(model, [i], 20))
        model.free_sequence(i)
    for i, sampling in enumerate(samplings):
        tiny.start(model, i, tiny.prompt(3 + 11 * i, i), sampling)
    text, logits = trace(model, [3, 1, 4, 0, 2], 20)
    for row, i in enumerate([3, 1, 4, 0, 2]):
        assert text[row] == alone[i][0][0]
        same(kind, logits[:, row], alone[i][1][:, 0])


def test_members_may_come_and_go(device: Backend, kind: str) -> None:
    model = tiny.open_model(device)
    want = {i: tiny.generate(model, tiny.prompt(9 + i, i), 13, SAMPLED) for i in range(4)}
    for i in range(4):
        tiny.start(model, i, tiny.prompt(9 + i, i), SAMPLED)
    for members in ([0, 1], [1, 2, 3], [3], [2, 0, 3, 1], [1, 0], [0, 1, 2, 3], [3, 2], [2, 0, 1, 3], [0, 1], [3, 2]):
        model.decode_batch(members)
    for i in range(4):
        got = list(model.sequence(i).tokens[9 + i :])
        assert len(got) > 4
        assert got == want[i][: len(got)]


def test_threads_change_nothing(open_backend: OpenBackend, kind: str) -> None:
    traces = []
    for threads in (1, 2):
        model = tiny.open_model(open_backend(threads=threads), fmt="q8_0")
        for i in (1, 2, 3):
            tiny.start(model, i, tiny.prompt(7 * i, i), SAMPLED)
        traces.append(trace(model, [1, 2, 3], 16))
    assert traces[0][0] == traces[1][0]
    same(kind, traces[0][1], traces[1][1])


def test_moving_a_sequence_to_another_row_changes_nothing(device: Backend, kind: str) -> None:
    model = tiny.open_model(device)
    want = {i: tiny.generate(model, tiny.prompt(9 + i, i), 21, SAMPLED) for i in range(5)}
    for i in range(5):
        tiny.start(model, i, tiny.prompt(9 + i, i), SAMPLED)
    model.decode_batch([0, 1, 2, 3, 4])
    model.free_sequence(1)
    model.free_sequence(2)
    model.compact_sequence(3, 5)
    model.decode_batch([4, 3])
    model.compact()
    assert {model.sequence(i).row for i in (0, 3, 4)} == {0, 1, 2}
    graphs = len(model.graph_keys())
    for i, row in zip((0, 3, 4), tiny.continue_(model, [0, 3, 4], 17), strict=True):
        assert row == want[i][: len(row)]
    assert len(model.graph_keys()) == graphs + 1


def test_saved_and_restored_sequences_go_on_with_the_same_bits(device: Backend, kind: str) -> None:
    model = tiny.open_model(device)
    for i in (1, 2):
        tiny.start(model, i, tiny.prompt(37, i), SAMPLED)
    trace(model, [1, 2], 3)
    saved = model.save_sequence(2)
    assert saved.nbytes == 3 * 2 * 2 * 16 * tiny.KV_HEADS * tiny.DIM * 4
    tiny.start(model, 3, tiny.prompt(50, 3))
    trace(model, [1, 3], 2)
    model.restore_sequence(saved)
    (one, two), logits = trace(model, [1, 2], 20)
    fresh = tiny.open_model(device)
    for i in (1, 2):
        tiny.start(fresh, i, tiny.prompt(37, i), SAMPLED)
    (want_one, want_two), want = trace(fresh, [1, 2], 25)
    assert one == want_one
    assert two == want_two[: len(two)]
    same(kind, logits[:, 1], want[3:23, 1])


@pytest.mark.parametrize("length", [16, 17, 33, 40])
def test_forks_share_the_prompt_and_draw_their_own(device: Backend, kind: str, length: int) -> None:
    model = tiny.open_model(device, kv_blocks=None)
    draws = [RowSampling(temperature=1.0, seed=77, choice=i) for i in range(3)]
    want = [tiny.generate(model, tiny.prompt(length), 25, draw) for draw in draws]
    assert want[0] != want[1]
    tiny.start(model, 0, tiny.prompt(length), draws[0])
    before = model.free_blocks
    for i in (1, 2):
        tiny.fork(model, 0, i, draws[i])
    assert before - model.free_blocks == (2 if (length - 1) % 16 else 0)
    model.decode_batch([1, 2])
    model.decode(0)
    assert [row[:24] for row in tiny.continue_(model, [2, 0, 1], 23)] == [want[2][:24], want[0][:24], want[1][:24]]
    model.free_sequence(0)
    tiny.continue_(model, [1, 2], 1)
    assert [list(model.sequence(i).tokens[length:]) for i in (1, 2)] == [want[1], want[2]]
    model.free_sequence(1)
    model.free_sequence(2)
    assert model.free_blocks == model.limits.blocks


def test_streams_that_run_as_late_as_they_may_change_nothing(open_backend: OpenBackend, kind: str) -> None:
    texts = []
    for deferred in (False, True):
        model = tiny.open_model(open_backend(deferred=deferred))
        for i in (1, 2, 3):
            tiny.start(model, i, tiny.prompt(40 + i, i), SAMPLED)
        tiny.continue_(model, [1, 2, 3], 9)
        model.restore_sequence(model.save_sequence(2))
        tiny.fork(model, 1, 4, RowSampling(temperature=1.0, seed=3, choice=1))
        model.compact_sequence(3, 5)
        texts.append(tiny.continue_(model, [4, 3, 2, 1], 9))
    assert texts[0] == texts[1]


def test_poisoned_blocks_change_nothing(device: Backend, kind: str) -> None:
    clean, poisoned = tiny.open_model(device), tiny.open_model(device, diagnosis=Diagnosis(guards=True, poison=True))
    texts = []
    for model in (clean, poisoned):
        for i in (1, 2):
            tiny.start(model, i, tiny.prompt(30 + i, i), SAMPLED)
        texts.append(trace(model, [1, 2], 20))
    assert texts[0][0] == texts[1][0]
    same(kind, texts[0][1], texts[1][1])
    assert poisoned.check_guards() == ()


def test_a_recycled_block_brings_nothing_with_it(device: Backend, kind: str) -> None:
    model = tiny.open_model(device, kv_blocks=20)
    want = tiny.generate(model, tiny.prompt(33), 12)
    for seed in range(5):
        tiny.generate(model, tiny.prompt(100 + seed, seed), 30)
    assert tiny.generate(model, tiny.prompt(33), 12) == want


def test_pinned_chunks_are_not_rewritten_before_they_are_read(open_backend: OpenBackend) -> None:
    prompt = tiny.prompt(61)
    texts = []
    for deferred in (False, True):
        model = tiny.open_model(open_backend(deferred=deferred), chunk_tokens=5)
        assert len(prompt) / 5 > 2 * (tiny.CONFIG.result_depth + 2)
        texts.append(tiny.generate(model, prompt, 12))
    assert texts[0] == texts[1]
