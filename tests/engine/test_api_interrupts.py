"""Ctrl-C and exceptions at any time: the call ends, nothing is held, the next one answers as ever."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale import LLM, SamplingParams
from tests.engine.tiny_checkpoint import write

PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=30, ignore_eos=True, n=2, logprobs=1, prompt_logprobs=1)
PROMPTS = ["first " * 7, "second", "third " * 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("interrupts") / "tiny")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", threads=2, max_rows=4, kv_blocks=25, chunk_tokens=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def want(opened: LLM) -> list[Any]:
    """The undisturbed answers."""
    return opened.generate(PROMPTS, PARAMS)


@pytest.fixture
def llm(opened: LLM, want: list[Any]) -> Iterator[LLM]:
    """The shared engine; afterwards it is empty and says what it said before."""
    yield opened
    gc.collect()
    assert opened.model.live_sequences() == ()
    assert opened.model.free_blocks == opened.model.limits.blocks
    assert opened.model.free_rows == opened.model.limits.rows
    again = opened.generate(PROMPTS, PARAMS)
    assert [(r.completions, r.prompt_logprobs) for r in again] == [(r.completions, r.prompt_logprobs) for r in want]
    assert opened.model.live_sequences() == ()


@pytest.mark.parametrize("step", range(0, 40, 3))
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_progress_callback_that_raises(llm: LLM, step: int, error: type[BaseException]) -> None:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        assert 0 <= done <= total
        calls += 1
        if calls > step:
            raise error

    with pytest.raises(error):
        llm.generate(PROMPTS, PARAMS, progress=progress)


@pytest.mark.parametrize("call", range(1, 60, 4))
def test_ctrl_c_inside_a_step(llm: LLM, call: int) -> None:
    """The signal arrives in the midst of the model's own Python code."""
    entered = 0

    def tracer(frame: Any, event: str, arg: Any) -> None:
        nonlocal entered
        if event == "call" and "metrale/model" in frame.f_code.co_filename:
            entered += 1
            if entered == call * 11:
                sys.setprofile(None)
                os.kill(os.getpid(), signal.SIGINT)

    sys.setprofile(tracer)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS)
    finally:
        sys.setprofile(None)


def test_another_stream_goes_on_after_an_interrupt(llm: LLM, want: list[Any]) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS)
    pieces = [next(stream) for _ in range(5)]
    execute, count = llm.model.execute, 0

    def late(plan: Any) -> Any:
        nonlocal count
        result = execute(plan)
        count += 1
        if count == 4:
            raise KeyboardInterrupt  # the model is a token ahead of what the engine knows
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.model, "execute", late)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], PARAMS)
    pieces += list(stream)
    assert pieces[-1].result is not None
    assert pieces[-1].result.completions == want[0].completions
    assert pieces[-1].result.prompt_logprobs == want[0].prompt_logprobs


def test_a_stream_left_early(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS[0], PARAMS):
        break
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.model.live_sequences() == ()


def test_a_stream_never_begun(llm: LLM) -> None:
    llm.stream(PROMPTS[0], PARAMS)
    llm.generate("other", PARAMS)
    assert llm.model.live_sequences() == ()


def test_an_exception_in_the_consumer(llm: LLM) -> None:
    def consume() -> None:
        for number, _ in enumerate(llm.stream(PROMPTS[0], PARAMS)):
            if number == 3:
                raise ValueError("the reader's own")

    with pytest.raises(ValueError, match="the reader's own"):
        consume()


def test_a_stream_abandoned_in_a_cycle(llm: LLM) -> None:
    """The collector may close it in the middle of another request's step."""
    holder: list[Any] = [llm.stream(PROMPTS[0], PARAMS)]
    next(holder[0])
    holder.append(holder)
    del holder
    execute = llm.model.execute

    def collecting(plan: Any) -> Any:
        gc.collect()
        return execute(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.model, "execute", collecting)
        llm.generate(PROMPTS[1], PARAMS)


def test_calls_from_several_threads(llm: LLM, want: list[Any]) -> None:
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        if number % 2:
            found[number] = llm.generate(PROMPTS[number % 3], PARAMS)
        else:
            found[number] = list(llm.stream(PROMPTS[number % 3], PARAMS))[-1].result

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: r.completions for i, r in found.items()} == {i: want[i % 3].completions for i in range(6)}


SCRIPT = """
import os, signal, sys, threading
from metrale import LLM, SamplingParams
folder = sys.argv[1]
params = SamplingParams(temperature=0.8, seed=4, max_tokens=80, ignore_eos=True, n=2)
with LLM(folder, device="cpu", threads=2, max_rows=4, kv_blocks=25) as llm:
    want = llm.generate("abc", params).completions
    stopped = 0
    for delay in (0.0005, 0.003, 0.01, 0.02, 0.05):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            while True:
                llm.generate(["abc", "d" * 40], params)
        except KeyboardInterrupt:
            stopped += 1
        timer.join()
        assert llm.model.live_sequences() == (), llm.model.live_sequences()
        assert llm.model.free_blocks == llm.model.limits.blocks
        assert llm.generate("abc", params).completions == want
print("stopped", stopped)
"""


def test_signals(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped 5\n", "")
