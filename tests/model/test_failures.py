"""A failure at any call of a step: nothing leaks, no capture stays open, the others go on, and a retry gives the same text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from metrale.backends.base import Backend
from metrale.errors import CaptureError, DeviceError
from metrale.model.plan import Chunk, RowSampling, SequenceSpec
from metrale.model.transformer import TransformerModel
from tests.model import tiny
from tests.model.conftest import OpenBackend

SAMPLED = RowSampling(temperature=0.8, seed=12, presence=0.2, logprobs=2)
PROMPT = tiny.prompt(20)
BYSTANDERS = (1, 2)


class InjectedError(Exception):
    """Not an error the model knows."""


class Fault:
    """Let `at` calls pass, then raise once."""

    def __init__(self, at: int | None, error: Exception | None = None) -> None:
        self.calls = 0
        self.at = at
        self.error = error if error is not None else InjectedError("injected")
        self.raised = False

    def __call__(self, name: str) -> None:
        self.calls += 1
        if self.at is not None and self.calls > self.at and not self.raised:
            self.raised = True
            raise self.error


@contextmanager
def injected(backend: Backend, fault: Fault) -> Any:
    backend.fault = fault
    try:
        yield fault
    finally:
        backend.fault = None


def check_books(model: TransformerModel, backend: Backend) -> None:
    """Blocks and rows in use are those the live sequences hold."""
    views = [model.sequence(i) for i in model.live_sequences()]
    assert not backend.stream.capturing
    held = {block for seq in model._core.sequences.values() for table in seq.tables for block in table.blocks[table.start :]}
    assert model.limits.blocks - model.free_blocks == len(held)
    assert model.limits.rows - model.free_rows == len({view.row for view in views}) == len(views)


def every_call(
    backend: Backend,
    action: Callable[[], Any],
    prepare: Callable[[], None],
    after: Callable[[bool], None],
    error: Callable[[], Exception] = lambda: InjectedError("injected"),
) -> int:
    """Run an action with a failure at its first call, its second, ... until it has none left; return how many it has."""
    at = 0
    while True:
        prepare()
        with injected(backend, Fault(at, error())) as fault:
            try:
                action()
            except (InjectedError, DeviceError):
                failed = True
            else:
                failed = False
        after(failed)
        if not fault.raised:
            return at
        at += 1


def opened(backend: Backend, **options: Any) -> tuple[TransformerModel, dict[int, list[int]]]:
    """Return a model with two bystanders, and what each sequence's text is when nothing fails."""
    model = tiny.open_model(backend, model_spec=tiny.spec(1), **options)
    want = {i: tiny.generate(model, tiny.prompt(20 + i, i), 50, SAMPLED) for i in BYSTANDERS}
    want[3] = tiny.generate(model, PROMPT, 6, SAMPLED)
    for i in BYSTANDERS:
        tiny.start(model, i, tiny.prompt(20 + i, i), SAMPLED)
    return model, want


def check_text(model: TransformerModel, want: dict[int, list[int]]) -> None:
    for i in model.live_sequences():
        view = model.sequence(i)
        got = list(view.tokens[view.prompt_len :])
        assert got == want[i][: len(got)], i


@pytest.mark.parametrize("chunk", [Chunk(3, 0, 13), Chunk(3, 13, 20)], ids=["first", "last"])
def test_a_prefill_chunk_fails_at_every_call(device: Backend, chunk: Chunk) -> None:
    model, want = opened(device)

    def prepare() -> None:
        model.free_sequence(3)
        model.alloc_sequence(SequenceSpec(3, PROMPT, len(PROMPT), SAMPLED))
        if chunk.start:
            model.prefill_chunk(Chunk(3, 0, chunk.start))

    def after(failed: bool) -> None:
        check_books(model, device)
        if failed:
            view = model.sequence(3)
            assert (view.launched, view.prefilled, view.tokens) == (chunk.start, False, PROMPT)
            model.prefill_chunk(chunk)
        if len(model.sequence(1).tokens) < 60:
            tiny.continue_(model, [1], 1)
        check_text(model, want)

    assert every_call(device, lambda: model.prefill_chunk(chunk), prepare, after) > 10
    model.prefill(3) if chunk.stop < 20 else None
    tiny.continue_(model, [3], 5)
    check_text(model, want)
    for i in (1, 2, 3):
        model.free_sequence(i)
    assert model.free_blocks == model.limits.blocks
    assert model.free_rows == model.limits.rows


@pytest.mark.parametrize("mode", ["eager", "capture", "replay"])
def test_a_decode_step_fails_at_every_call(device: Backend, mode: str) -> None:
    model, want = opened(device)
    if mode == "eager":
        model.suppress_graphs("test")

    def prepare() -> None:
        model.free_sequence(3)
        tiny.start(model, 3, PROMPT, SAMPLED)
        tiny.continue_(model, [3, 2] if mode == "replay" else [3], 1)
        if mode == "capture":
            model.drop_graphs("test")

    def after(failed: bool) -> None:
        check_books(model, device)
        if failed:
            assert len(model.sequence(3).tokens) == 22
            model.decode_batch([3, 2])
        check_text(model, want)

    assert every_call(device, lambda: model.decode_batch([3, 2]), prepare, after) > (0 if mode == "replay" else 10)
    tiny.continue_(model, [1, 2], 3)
    check_text(model, want)


def test_a_capture_that_fails_runs_the_step_eagerly(device: Backend, caplog: pytest.LogCaptureFixture) -> None:
    model, want = opened(device)

    def prepare() -> None:
        model.free_sequence(3)
        tiny.start(model, 3, PROMPT, SAMPLED)
        model.drop_graphs("test")

    def after(failed: bool) -> None:
        check_books(model, device)
        if failed:  # outside the capture: staging before it, launch or reading after it
            model.decode(3)
        assert len(model.sequence(3).tokens) == 22
        check_text(model, want)

    before = model.stats.eager_steps
    every_call(device, lambda: model.decode(3), prepare, after, lambda: DeviceError("injected", code="device.test"))
    assert model.stats.eager_steps - before > 10
    assert "the step runs eagerly: injected" in caplog.text


def test_a_failed_capture_raises_under_strict(device: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    model, want = opened(device)
    model.drop_graphs("test")
    monkeypatch.setenv("METRALE_STRICT", "1")
    tiny.start(model, 3, PROMPT, SAMPLED)
    with injected(device, Fault(0, DeviceError("injected"))), pytest.raises(CaptureError, match="injected") as err:
        model.decode(3)
    assert err.value.code == "capture.declined"
    check_books(model, device)
    tiny.continue_(model, [3, 1], 4)
    check_text(model, want)


def test_a_key_that_keeps_failing_is_left_alone(device: Backend) -> None:
    model, _ = opened(device)
    model.drop_graphs("test")
    for _ in range(3):
        with injected(device, Fault(0, DeviceError("injected"))) as fault:
            model.decode(1)
        assert fault.raised
    with injected(device, Fault(None)) as fault:
        model.decode(1)
    assert model.stats.graphs == 0
    model.drop_graphs("another try")
    model.decode(1)
    assert model.stats.graphs == 1


@pytest.mark.parametrize("action", ["fork", "save", "restore", "score"])
def test_copies_fail_at_every_call(device: Backend, action: str) -> None:
    model, want = opened(device)
    tiny.start(model, 3, PROMPT, SAMPLED)
    saved: list[Any] = []

    def prepare() -> None:
        model.free_sequence(4)
        if action == "restore":
            saved[:] = [model.save_sequence(3)] if 3 in model.live_sequences() else saved

    def run() -> None:
        if action == "fork":
            tiny.fork(model, 3, 4, SAMPLED)
        elif action == "save":
            saved[:] = [model.save_sequence(3)]
        elif action == "restore":
            model.restore_sequence(saved[0])
        else:
            model.score(PROMPT)

    def after(failed: bool) -> None:
        check_books(model, device)
        assert (4 in model.live_sequences()) == (action == "fork" and not failed)
        if 3 not in model.live_sequences():
            model.restore_sequence(saved[0])
        if len(model.sequence(3).tokens) < 25 and not failed:
            model.decode_batch([3, 2])
        check_text(model, want | {4: want[3]})

    assert every_call(device, run, prepare, after) > 0
    tiny.continue_(model, [3, 1], 3)
    check_text(model, want | {4: want[3]})


@pytest.mark.parametrize("deferred", [False, True])
def test_ctrl_c_in_a_step_costs_nothing(open_backend: OpenBackend, deferred: bool) -> None:
    device = open_backend(deferred=deferred)
    model, want = opened(device)
    for at in range(0, 40, 3):
        fault = Fault(at)
        fault.error = KeyboardInterrupt()  # type: ignore[assignment]
        with injected(device, fault), suppress(KeyboardInterrupt):
            model.decode_batch([1, 2])
        check_books(model, device)
    tiny.continue_(model, [2, 1], 5)
    check_text(model, want)


def test_a_fault_while_the_device_runs_is_raised_and_undone(open_backend: OpenBackend) -> None:
    device = open_backend(deferred=True)
    model, want = opened(device)

    class LateFault(Fault):
        """Queue work that fails in place of failing the call."""

        def __call__(self, name: str) -> None:
            self.calls += 1
            if self.calls > (self.at or 0) and not self.raised and name not in ("synchronize", "query"):
                self.raised = True
                device.stream.enqueue(boom)  # type: ignore[attr-defined]

    def boom() -> None:
        raise DeviceError("late", code="device.test")

    failures = 0
    for at in range(12):
        for mode in ("graph", "eager"):
            model.suppress_graphs("test") if mode == "eager" else model.allow_graphs("test")
            with injected(device, LateFault(at)) as fault:
                try:
                    model.decode_batch([2, 1])
                except DeviceError:
                    failures += 1
            check_books(model, device)
            check_text(model, want)
            assert fault.calls
    assert failures >= 12
    tiny.continue_(model, [1, 2], 10)
    check_text(model, want)


def test_an_interrupt_between_two_lines_of_bookkeeping_undoes_the_step(device: Backend) -> None:
    model, want = opened(device)
    tiny.continue_(model, [1, 2], 3)

    class Interrupted(list[int]):
        def append(self, token: int) -> None:
            super().append(token)
            raise KeyboardInterrupt

    for i in (2, 1):
        seq = model._core.sequences[i]
        seq.tokens = Interrupted(seq.tokens)
        before = [model.sequence(s) for s in (1, 2)]
        with pytest.raises(KeyboardInterrupt):
            model.decode_batch([1, 2])
        seq.tokens = list(seq.tokens)
        assert [model.sequence(s) for s in (1, 2)] == before
    tiny.continue_(model, [1, 2], 3)
    check_text(model, want)
