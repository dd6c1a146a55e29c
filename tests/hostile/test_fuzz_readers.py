"""Replay the fuzzer's corpus, and fuzz for a minute when there is time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.fuzz_readers import CORPUS, Box, fuzz

INPUTS = sorted(CORPUS.glob("*.bin"))


def test_the_corpus_is_there_and_small() -> None:
    assert len(INPUTS) > 50
    assert sum(path.stat().st_size for path in INPUTS) < 300_000


def test_the_corpus_ends_as_its_names_say(tmp_path: Path) -> None:
    """Every kept input ends in the code of its name: KIND-CODE-HASH.bin. The codes are part of the interface."""
    box = Box(tmp_path)
    wrong = []
    for path in INPUTS:
        kind, code, _ = path.stem.split("-")
        outcome = box.run(kind, path.read_bytes())
        if outcome.failure or outcome.code != code:
            wrong.append(f"{path.name}: {outcome.code} {outcome.failure}")
    assert not wrong, "\n".join(wrong)


def test_a_short_run_finds_nothing() -> None:
    result = fuzz(5, inputs=len(INPUTS) + 1000)
    assert not result.failures, result.failures[0][2]


@pytest.mark.slow
def test_a_minute_finds_nothing() -> None:
    result = fuzz(6, seconds=60)
    assert not result.failures, result.failures[0][2]
