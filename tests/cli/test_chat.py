"""`metrale chat` on a terminal and in a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.terminal import Terminal, metrale

pytestmark = pytest.mark.model
PROMPT = r"> $"


def test_a_conversation_on_a_terminal(smollm2_path: Path) -> None:
    with Terminal("chat", str(smollm2_path), "--temperature", "0", "--max-tokens", "24") as chat:
        chat.wait_for(PROMPT)
        assert "/reset forgets" in chat.seen
        chat.type("My name is Olga.\n")
        chat.wait_for(r"\n> $")
        first = len(chat.seen)
        chat.type("What is my name?\n")
        chat.wait_for(r"\n> $", after=first)
        assert "Olga" in chat.seen[first:], chat.seen
        second = len(chat.seen)
        chat.type("/reset\n")
        chat.wait_for(r"\n> $", after=second)
        third = len(chat.seen)
        chat.type("What is my name?\n")
        chat.wait_for(r"\n> $", after=third)
        assert "Olga" not in chat.seen[third:], chat.seen
        fourth = len(chat.seen)
        chat.type("/nosuch\n")
        chat.wait_for(r"/system TEXT changes(.|\n)*\n> $", after=fourth)
        chat.type("\x04")
        assert chat.finish() == 0
    assert "Traceback" not in chat.seen


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(smollm2_path: Path) -> None:
    with Terminal("chat", str(smollm2_path), "--temperature", "0", "--max-tokens", "400") as chat:
        chat.wait_for(PROMPT)
        chat.type("\x03")  # at the prompt: nothing happens but a new line
        chat.wait_for(r"> .*\n(\^C)?\r?\n?> $")
        before = len(chat.seen)
        chat.type("Write a very long story about a dog.\n")
        chat.wait_for(r"dog\.\r?\n(.|\n){20}", after=before)
        chat.type("\x03")
        chat.wait_for(r"\[stopped\]\s*> $", after=before)
        after = len(chat.seen)
        chat.type("Hi\n")
        chat.wait_for(r"Hi\r?\n(.|\n)+\n> $", after=after)
        assert "[stopped]" not in chat.seen[after:]
        chat.type("/exit\n")
        assert chat.finish() == 0
    assert "Traceback" not in chat.seen


@pytest.mark.model
def test_a_system_prompt_is_heeded_in_a_pipe(smollm2_path: Path) -> None:
    lines = b"Hi\n/system You speak French.\n/reset\nHi\n\n/exit\nnot read\n"
    done = metrale("chat", str(smollm2_path), "--temperature", "0", "--max-tokens", "12", stdin=lines)
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.splitlines()
    assert answers[0].startswith("Hello!")
    assert len([a for a in answers if a]) >= 2
    assert answers[-1] != answers[0]


def test_lines_that_cannot_be_answered_keep_the_chat(tiny: Path) -> None:
    lines = b"x" * 200 + b"\nbad \xff bytes\nok\n"
    done = metrale("chat", str(tiny), "--max-tokens", "3", "--seed", "1", stdin=lines)
    assert done.returncode == 0
    said = done.stderr.splitlines()
    assert [line[line.rindex("[") :] for line in said] == ["[prompt.length]", "[chat.messages]"]
    assert done.stdout
