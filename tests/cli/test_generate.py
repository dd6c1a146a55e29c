"""`metrale generate`: what goes to stdout, what to stderr, and to whom."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.terminal import COMMAND, Terminal, default_interrupts, group, metrale

PROMPT = "The capital of France is"
GREEDY = ("--temperature", "0", "--max-tokens", "6")


@pytest.mark.model
def test_a_pipe_gets_the_answer_and_nothing_else(smollm2_path: Path) -> None:
    done = metrale("generate", "smollm2-135m", PROMPT, *GREEDY)
    assert done.returncode == 0
    assert done.stdout.startswith(" Paris.")
    assert done.stdout.endswith("\n")
    assert done.stderr == ""


@pytest.mark.model
def test_a_terminal_gets_progress_and_speed_on_stderr(smollm2_path: Path) -> None:
    with Terminal("generate", str(smollm2_path), PROMPT, *GREEDY, stdout_pipe=True) as terminal:
        assert terminal.finish() == 0
        assert terminal.process.stdout is not None
        assert terminal.process.stdout.read().startswith(b" Paris.")
    assert "loading" in terminal.seen
    assert "5 prompt tokens, first token after" in terminal.seen
    assert "6 tokens at" in terminal.seen
    assert "ended: length" in terminal.seen
    assert "Paris" not in terminal.seen


@pytest.mark.model
def test_a_long_prompt_shows_progress(smollm2_path: Path) -> None:
    with Terminal("generate", str(smollm2_path), "word " * 600, "--max-tokens", "1", stdout_pipe=True) as terminal:
        assert terminal.finish() == 0
    assert "reading" in terminal.seen


@pytest.mark.model
def test_chat_and_system(smollm2_path: Path) -> None:
    plain = group(metrale("generate", "smollm2-135m", "Hi", "--json", *GREEDY).stdout)
    chat = group(metrale("generate", "smollm2-135m", "Hi", "--json", "--chat", *GREEDY).stdout)
    system = group(metrale("generate", "smollm2-135m", "-", "--json", "--system", "Be kind.", *GREEDY, stdin=b"Hi").stdout)
    assert len(plain["prompt_token_ids"]) == 1
    assert chat["prompt_token_ids"][0] == system["prompt_token_ids"][0] == 1
    assert len(chat["prompt_token_ids"]) != len(system["prompt_token_ids"])
    assert chat["completions"][0]["text"].startswith("Hello!")


def test_json(tiny: Path) -> None:
    done = metrale("generate", str(tiny), "abc", "--json", "--max-tokens", "4", "--seed", "18446744073709551615")
    answer = group(done.stdout)
    assert done.stderr == ""
    assert answer["seed"] == 2**64 - 1
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": len(answer["completions"][0]["token_ids"])}
    assert answer["completions"][0]["finish_reason"] in ("length", "stop")
    done = metrale("generate", str(tiny), "-", "--json", "--max-tokens", "4", "--seed", str(2**64 - 1), stdin=b"abc")
    again = group(done.stdout)
    assert again["completions"] == answer["completions"]


@pytest.mark.parametrize(
    ("args", "stdin", "code"),
    [
        (["", ""], b"", "prompt.empty"),
        (["-"], b"", "prompt.empty"),
        (["-"], b"not \xff UTF-8", "prompt.text"),
        (["a" * 200], b"", "prompt.length"),
        (["abc", "--temperature", "-1"], b"", "sampling.temperature"),
        (["abc", "--max-tokens", "0"], b"", "sampling.max_tokens"),
        (["abc", "--stop", ""], b"", "sampling.stop"),
        (["abc", "--threads", "-1"], b"", "engine.threads"),
        (["abc", "--max-context", "0"], b"", "engine.max_context"),
    ],
)
def test_bad_input_is_one_sentence_and_status_1(tiny: Path, args: list[str], stdin: bytes, code: str) -> None:
    done = metrale("generate", str(tiny), *args[:1], *[a for a in args[1:] if a or "--stop" in args], stdin=stdin)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("metrale: ")
    assert done.stderr.endswith(f"[{code}]\n")
    assert done.stderr.count("\n") == 1
    assert ": expected " in done.stderr


def test_unknown_model_and_variable(tiny: Path) -> None:
    done = metrale("generate", "no-such-model", "abc")
    assert done.returncode == 1
    assert "[model.not_found]" in done.stderr
    done = metrale("generate", str(tiny), "abc", env={"METRALE_CASHE": "x"})
    assert done.returncode == 1
    assert "did you mean METRALE_CACHE?" in done.stderr


def test_characters_the_terminal_cannot_show(tiny: Path) -> None:
    done = metrale("generate", str(tiny), "abc", "--max-tokens", "40", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "args",
    [["generate", "{tiny}", "abc", "--max-tokens", "60"], ["inspect", "{tiny}", "--tensors"], ["inspect", "env"], ["doctor"]],
    ids=lambda args: args[0],
)
def test_a_reader_that_leaves(tiny: Path, args: list[str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, *(a.format(tiny=tiny) for a in args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if args[0] == "generate":
        process.stdout.read(1)
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1)  # doctor may find a problem
    assert said == b""


FULL = [["generate", "{tiny}", "abc", "--max-tokens", "9"], ["inspect", "{tiny}", "--tensors"], ["inspect", "env"]]


# Without a buffer argparse itself drops the error of its write.
@pytest.mark.parametrize(
    ("args", "unbuffered"), [*((args, mode) for args in FULL for mode in ("", "1")), (["--version"], "")]
)
def test_a_full_disk(tiny: Path, args: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, *(a.format(tiny=tiny) for a in args)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("metrale: stdout: expected to take the output, got [Errno 28]")
    assert done.stderr.endswith("[cli.output]\n")


def test_ctrl_c_at_any_time(tiny: Path) -> None:
    """From the first import to the middle of the answer: status 130 and no traceback, or the whole answer."""
    for delay in (0.15, 0.3, 0.5, 0.8, 1.2):
        process = subprocess.Popen(
            [*COMMAND, "generate", str(tiny), "abc"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_interrupts,
        )  # fmt: skip
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        # Python may end itself by the signal instead, which a shell reports as 130 too.
        assert process.returncode in (0, 130, -signal.SIGINT), (delay, said.decode())
        assert b"Traceback" not in said, (delay, said.decode())


@pytest.mark.model
def test_ctrl_c_in_mid_answer(smollm2_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", str(smollm2_path), PROMPT, "--temperature", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + rest).startswith(b" Paris")
    assert said.strip() == b""
