"""Staging into pinned memory: patches and prefill rows; what is refused has written nothing."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale._ext.staging import PatchWriter, RowPacker
from metrale.errors import DeviceError

WORDS = 1000


def ring(depth=3, capacity=5):
    entries = np.full((depth, 2 + 2 * capacity), -77, np.int32)
    entries[:, 0] = 0
    return entries, PatchWriter(entries, WORDS)


def pairs(entry):
    count = int(entry[0])
    return [tuple(pair) for pair in entry[2 : 2 + 2 * count].reshape(count, 2).tolist()]


def code_of(use):
    with pytest.raises(DeviceError) as caught:
        use()
    return caught.value.code


def test_pairs_land_in_the_entry_of_the_step_and_show_with_the_commit():
    entries, writer = ring()
    writer.begin(4, 4)
    writer.put(7, -3)
    writer.put(9, 2**32 - 2)  # unsigned words are welcome
    writer.put_float(11, -1.5)
    writer.put_words(20, [5, 6])
    assert not entries[:, 0].any()
    assert (writer.count, writer.room, writer.capacity) == (5, 0, 5)
    assert writer.commit() == 5
    bits = struct.unpack("<i", struct.pack("<f", -1.5))[0]
    assert pairs(entries[1]) == [(7, -3), (9, -2), (11, bits), (20, 5), (21, 6)]
    assert not writer.is_open


def test_an_entry_without_patches_stays_untouched():
    entries, writer = ring()
    before = entries.copy()
    writer.begin(0, 0)
    assert writer.commit() == 0
    np.testing.assert_array_equal(entries, before)


@pytest.mark.parametrize("values", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), range(1, 4), iter([1, 2, 3])])
def test_words_come_in_many_forms(values):
    entries, writer = ring()
    writer.begin(0, 0)
    writer.put_words(WORDS - 3, values)
    writer.put_words(0, [])
    writer.commit()
    assert pairs(entries[0]) == [(WORDS - 3, 1), (WORDS - 2, 2), (WORDS - 1, 3)]


def test_what_does_not_fit_is_refused_before_any_word_lands():
    entries, writer = ring()
    writer.begin(0, 0)
    writer.put(1, 1)
    before = entries.copy()
    for use, code in (
        (lambda: writer.put_words(0, [1] * 5), "staging.capacity"),
        (lambda: writer.put_words(WORDS - 2, [1] * 3), "staging.offset"),
        (lambda: writer.put(WORDS, 1), "staging.offset"),
        (lambda: writer.put(-1, 1), "staging.offset"),
        (lambda: writer.put(0, 2**32), "staging.value"),
        (lambda: writer.put(0, -(2**31) - 1), "staging.value"),
        (lambda: writer.put(0, 2**70), "staging.value"),
        (lambda: writer.put_words(0, [1, 2**40]), "staging.value"),
        (lambda: writer.rollback(2), "staging.capacity"),
    ):
        assert code_of(use) == code
    with pytest.raises(TypeError):
        writer.put_words(0, [1, "2"])
    with pytest.raises(ValueError, match="dtype"):
        writer.put_words(0, np.zeros(2, np.int64))
    np.testing.assert_array_equal(entries, before)
    assert writer.count == 1
    writer.put_words(2, [2, 3, 4, 5])
    assert code_of(lambda: writer.put(0, 0)) == "staging.capacity"


def test_a_step_that_fails_leaves_no_patch():
    entries, writer = ring()
    writer.begin(0, 0)
    writer.put(1, 1)
    writer.discard()
    writer.discard()
    assert not entries[0, 0]
    writer.begin(0, 0)
    writer.put(2, 2)
    mark = writer.count
    writer.put_words(3, [3, 4])
    writer.rollback(mark)
    writer.put(9, 9)
    writer.commit()
    assert pairs(entries[0]) == [(2, 2), (9, 9)]


def test_no_entry_is_rewritten_before_its_step_has_ended():
    entries, writer = ring(depth=3)
    assert code_of(lambda: writer.begin(3, 0)) == "staging.busy"  # step 0 may still read entry 0, patches or none
    writer.begin(3, 1)
    writer.put(1, 1)
    writer.commit()
    assert code_of(lambda: writer.begin(6, 4)) == "staging.busy"  # said to have ended, but its patches were never read
    entries[0, 0] = 0
    writer.begin(6, 4)
    assert code_of(lambda: writer.begin(7, 5)) == "staging.open"
    writer.commit()
    assert code_of(writer.commit) == "staging.open"
    assert code_of(lambda: writer.put(0, 0)) == "staging.open"
    assert code_of(lambda: writer.begin(5, 6)) == "staging.busy"  # a step of the past
    entries[:, 0] = 4
    writer.reset()
    assert not entries[:, 0].any()


@given(st.lists(st.tuples(st.integers(0, 900), st.lists(st.integers(-(2**31), 2**32 - 1), max_size=9)), max_size=12))
def test_a_replay_of_the_pairs_gives_the_words(puts):
    entries, writer = ring(depth=2, capacity=30)
    words, want = np.zeros(WORDS, np.int64), np.zeros(WORDS, np.int64)
    writer.begin(1, 0)
    for offset, values in puts:
        if len(values) > writer.room:
            assert code_of(lambda offset=offset, values=values: writer.put_words(offset, values)) == "staging.capacity"
            continue
        writer.put_words(offset, values)
        want[offset : offset + len(values)] = np.array(values, np.int64).astype(np.uint32).view(np.int32)
    writer.commit()
    for offset, value in pairs(entries[1]):
        words[offset] = value
    np.testing.assert_array_equal(words, want)


def test_bad_rings():
    for shape in ((0, 8), (3, 7), (3, 2)):
        assert code_of(lambda shape=shape: PatchWriter(np.zeros(shape, np.int32), WORDS)) == "op.shape"


# --- prefill rows ------------------------------------------------------------------------------------------------------


def test_rows_of_several_sequences_and_padding():
    words = np.full(50, 99, np.int32)
    packer = RowPacker(words)
    packer.begin(7)
    assert packer.add([11, 12, 13], 4, 20) == 0
    assert packer.add(np.array([21, 22], np.int32), 0, 5, delta=-2) == 3
    assert packer.finish() == 5
    ids, seq, index, position = words[:28].reshape(4, 7).tolist()
    assert ids == [11, 12, 13, 21, 22, 0, 0]
    assert seq == [4, 4, 4, 0, 0, -1, -1]
    assert index == [20, 21, 22, 5, 6, 0, 0]
    assert position == [20, 21, 22, 3, 4, 0, 0]
    assert (words[28:] == 99).all()


def test_rows_that_do_not_fit_are_refused_whole():
    words = np.full(21, 99, np.int32)
    packer = RowPacker(words)
    assert code_of(lambda: packer.begin(6)) == "staging.capacity"
    assert code_of(lambda: packer.add([1], 0, 0)) == "staging.capacity"
    packer.begin(5)
    packer.add([1, 2, 3], 0, 0)
    before = words.copy()
    for use, code in (
        (lambda: packer.add([1, 2, 3], 0, 0), "staging.capacity"), (lambda: packer.add([1], -1, 0), "staging.value"),
        (lambda: packer.add([1], 0, -1), "staging.value"), (lambda: packer.add([1], 0, 3, delta=-4), "staging.value"),
        (lambda: packer.add([1, 2**33], 0, 0), "staging.value"), (lambda: packer.add([1], 0, 2**31), "staging.value"),
    ):
        assert code_of(use) == code
    np.testing.assert_array_equal(words, before)
    assert packer.add([], 0, 0) == 3
    assert packer.used == 3
