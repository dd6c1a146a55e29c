"""The row state: patches, decode batches, histories, results."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import FIELD, Backend
from tests.helpers import (
    HostRows,
    down,
    fields_of,
    patch_ring,
    poisoned_batch,
    result_ring,
    up,
    up_batch,
)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=9), depth=st.integers(1, 4), start=st.integers(0, 6),
       seed=st.integers(0, 99))
def test_patches_are_applied_once_and_in_order(backend: Backend, counts: list[int], depth: int, start: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    state = HostRows(3).upload(backend)
    want = backend.download(state.words)
    ring, pinned = patch_ring(backend, depth, 5, cursor=start)
    for step, count in enumerate(counts):
        entry = (start + step) % depth
        pairs = np.stack([rng.integers(0, len(want), count), rng.integers(-(2**31), 2**31, count)], axis=1)
        pinned[entry, 0] = count
        pinned[entry, 2 : 2 + 2 * count] = pairs.reshape(-1)
        backend.stream.ops.rows_patch(state, ring)
        backend.stream.synchronize()
        for offset, value in pairs:
            want[offset] = value
        assert pinned[entry, 0] == 0
        assert down(backend, ring.cursor).tolist() == [start + step + 1]
        np.testing.assert_array_equal(backend.download(state.words), want)


def test_an_untouched_entry_changes_nothing(backend: Backend) -> None:
    state = HostRows(2).upload(backend)
    before = backend.download(state.words)
    ring, pinned = patch_ring(backend, 2, 3)
    pinned[:, 2:] = 7  # leftovers of an earlier step
    for _ in range(3):
        backend.stream.ops.rows_patch(state, ring)
    backend.stream.synchronize()
    np.testing.assert_array_equal(backend.download(state.words), before)
    assert down(backend, ring.cursor).tolist() == [3]


def test_a_decode_batch_follows_the_order(backend: Backend) -> None:
    rows = HostRows(5, max_tokens=31).order(3, -1, 0, 4)
    rows.set(0, token=11, index=7, limit=16, delta=2).set(3, token=5, index=15, limit=16)
    rows.set(4, token=9, index=16, limit=16, delta=30, flag=2)
    rows.set(1, token=1, index=1, limit=16)  # in no step row
    state = rows.upload(backend)
    batch = poisoned_batch(backend, 4)
    backend.stream.ops.rows_begin(batch, state)
    assert down(backend, batch.seq).tolist() == [3, -1, 0, -1]
    assert down(backend, batch.ids).tolist() == [5, 0, 11, 0]
    assert down(backend, batch.index).tolist() == [15, 0, 7, 0]
    assert down(backend, batch.position).tolist() == [15, 0, 9, 0]
    rows.set(4, flag=3)
    rows.tokens(0)[7], rows.tokens(3)[15] = 11, 5
    np.testing.assert_array_equal(backend.download(state.words), rows.words)


def test_a_batch_smaller_than_the_state(backend: Backend) -> None:
    state = HostRows(6).set(2, token=4, index=3).order(2, 5, 0).upload(backend)
    batch = poisoned_batch(backend, 1)
    backend.stream.ops.rows_begin(batch, state)
    assert [down(backend, a).tolist() for a in batch] == [[4], [2], [3], [3]]


def test_a_prompt_goes_to_the_histories(backend: Backend) -> None:
    rows = HostRows(3, max_tokens=23)
    state = rows.upload(backend)
    seq, index = np.array([2, 2, 0, -1, 2, 0]), np.array([0, 1, 22, 5, 2, 7])
    ids = np.array([31, 32, 33, 34, 35, 36])
    backend.stream.ops.rows_prefill(up_batch(backend, seq, index, ids=ids), state)
    for s, i, token in zip(seq, index, ids, strict=True):
        if s >= 0:
            rows.tokens(s)[i] = token
    np.testing.assert_array_equal(backend.download(state.words), rows.words)


def test_commit(backend: Backend) -> None:
    rows = HostRows(4)
    state = rows.upload(backend)
    backend.stream.ops.rows_commit(up(backend, [8, 9, 6]), up(backend, [3, -1, 0]), up(backend, [17, 5, 0]), state)
    rows.set(3, token=8, index=18).set(0, token=6, index=1)
    np.testing.assert_array_equal(backend.download(state.words), rows.words)


def test_steps_feed_themselves(backend: Backend) -> None:
    """begin, commit, begin ...: the token list grows without the host."""
    state = HostRows(2, max_tokens=19).set(1, token=50, index=4, limit=9, delta=1).order(1).upload(backend)
    batch = poisoned_batch(backend, 1)
    for step in range(6):
        backend.stream.ops.rows_begin(batch, state)
        assert down(backend, batch.seq).tolist() == [1 if step < 5 else -1]
        backend.stream.ops.rows_commit(up(backend, [60 + step]), batch.seq, batch.index, state)
    after = HostRows.read(backend, state)
    assert after.tokens(1)[4:10].tolist() == [50, 60, 61, 62, 63, -77]
    assert (after.get(1, "token"), after.get(1, "index"), after.get(1, "flag")) == (64, 9, 1)


def test_publish(backend: Backend) -> None:
    ring, host = result_ring(backend, 3, 5, cursor=7)
    state = HostRows(5).set(1, flag=1).set(4, flag=2).upload(backend)
    for step, ids in enumerate(([9, 8, 7], [6, 5], [4], [3, 2, 1, 0, 5])):
        entry = (7 + step) % 3
        before = {name: array.copy() for name, array in host.items()}
        seq = up(backend, np.arange(len(ids)) - 1)
        backend.stream.ops.publish(ring, up(backend, ids), seq, state)
        backend.stream.synchronize()
        assert host["header"][entry, :3].tolist() == [7 + step, len(ids), 3]
        assert host["ids"][entry, : len(ids)].tolist() == ids
        np.testing.assert_array_equal(host["ids"][entry, len(ids) :], before["ids"][entry, len(ids) :])
        others = [e for e in range(3) if e != entry]
        for name, array in host.items():
            np.testing.assert_array_equal(array[others], before[name][others])
    assert down(backend, ring.cursor).tolist() == [11]
    assert not fields_of(backend.download(state.words), state.layout)[:, FIELD["token"]].any()
