"""The benchmark's arithmetic and its options."""

from __future__ import annotations

import argparse

import pytest

from bench import cpu


def test_fewer_than_three_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cpu.arguments(parser)
    assert parser.parse_args([]).rounds == 3
    assert parser.parse_args(["--rounds", "5"]).rounds == 5
    for text in ("2", "0", "-3", "many"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--rounds", text])
    assert "expected at least 3, got 2" in capsys.readouterr().err


def test_decode_is_compared_with_the_bytes_of_the_tensors() -> None:
    run = {"decode_tok_s": 50.0, "rss_peak": 900, "rss_before": 100, "file_bytes": 10**9, "kv_bytes": 1, "weight_bytes": 4e8}
    line = cpu._ours([run] * 3, 40.0, 2)[0]
    assert (line.name, line.value, line.ratio) == ("cpu/decode-of-read-loop", 20.0, 0.5)
