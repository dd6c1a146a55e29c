"""Waiting for results: numbers, polls that end a wait, faults, late readers."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from metrale._ext.argmax import RingReader
from metrale.backends.cpu.backend import CpuBackend
from metrale.backends.cpu.emit import Emitter
from metrale.errors import DeviceError
from tests.toys import emit_affine


def ring(depth=3, rows=5):
    header, ids = np.zeros((depth, 4), np.int32), np.full((depth, rows), -9, np.int32)
    return header, ids, RingReader(header, ids)


def publish(header, ids, number, values, flags=0):
    entry = number % len(header)
    ids[entry, : len(values)] = values
    header[entry, 1:3] = len(values), flags
    header[entry, 0] = number


def code_of(use):
    with pytest.raises(DeviceError) as caught:
        use()
    return caught.value.code


def test_a_result_that_is_there_is_read_at_once():
    header, ids, reader = ring()
    publish(header, ids, 4, [7, 0, 2], flags=3)
    assert reader.ready(4)
    reader.wait(4)
    got = reader.read(4, 2)
    assert got == ([7, 0], 3)
    assert all(type(value) is int for value in got[0])
    assert reader.read(4, 0) == ([], 3)


def test_what_is_not_there_is_not_read():
    header, ids, reader = ring()
    publish(header, ids, 4, [7, 0, 2])
    assert not reader.ready(1)  # the same entry, an earlier number
    assert not reader.ready(7)
    assert not reader.ready(0)
    for number, rows in ((1, 1), (7, 1), (5, 1), (0, 1), (4, 4), (4, 6), (4, -1)):
        assert code_of(lambda number=number, rows=rows: reader.read(number, rows)) == "result.missing"
    assert code_of(lambda: reader.wait(1)) == "result.missing"  # a later result has taken the entry
    assert code_of(lambda: reader.wait(0)) == "result.missing"


@pytest.mark.parametrize("delay_s", [0.0, 0.00002, 0.002])
def test_a_result_that_comes_from_another_thread(delay_s):
    header, ids, reader = ring()

    def device():
        for number in range(1, 40):
            time.sleep(delay_s)
            while header[(number - 3) % 3, 0] == number - 3 and number > 3 and not read[number - 3]:
                time.sleep(0)
            publish(header, ids, number, [number, number + 1])

    read = [False] * 40
    thread = threading.Thread(target=device)
    thread.start()
    for number in range(1, 40):
        reader.wait(number, timeout_s=60)
        assert reader.read(number, 2)[0] == [number, number + 1]
        read[number] = True
    thread.join()


def test_a_poll_that_raises_ends_the_wait():
    _, _, reader = ring()
    calls = []

    def poll():
        calls.append(1)
        if len(calls) == 5:
            raise DeviceError("the device has failed", code="device.fault")
        return False

    assert code_of(lambda: reader.wait(1, poll)) == "device.fault"


def test_a_step_that_ends_without_its_result():
    _, _, reader = ring()
    answers = iter([False, False, True])
    assert code_of(lambda: reader.wait(1, lambda: next(answers))) == "result.missing"


def test_a_poll_that_runs_the_step_ends_the_wait():
    """A deferred stream runs only when it is asked often enough: the poll is what makes the result come."""
    backend = CpuBackend(threads=2, streams="deferred")
    header, ids = backend.alloc_pinned((3, 4), "i32"), backend.alloc_pinned((3, 5), "i32")
    reader = RingReader(header, ids)
    # The toy writes floats: 0 * factor + shift, so the bits of 2^-149 * n are the int n.
    number, ones = header[1, :2].view(np.float32), backend.alloc((2,), "f32", zero=True)
    emit_affine(Emitter(backend.stream), number, ones, 1, 2.0**-149)
    event = backend.stream.record()
    assert not reader.ready(1)
    reader.wait(1, event.query)
    assert header[1, :2].tolist() == [1, 1]
    backend.close()


def test_a_wait_has_an_end_and_can_be_interrupted():
    _, _, reader = ring()
    assert code_of(lambda: reader.wait(1, timeout_s=0.01)) == "result.timeout"

    def stop(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            reader.wait(1, lambda: False)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            reader.wait(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_bad_rings():
    for header, ids in (((3, 3), (3, 5)), ((3, 4), (2, 5)), ((0, 4), (0, 5))):
        assert code_of(lambda h=header, i=ids: RingReader(np.zeros(h, np.int32), np.zeros(i, np.int32))) == "op.shape"
