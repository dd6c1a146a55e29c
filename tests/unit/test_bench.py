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


def test_decode_is_compared_with_the_bytes_a_step_reads() -> None:
    run = {"decode_tok_s": 50.0, "rss_peak": 900, "rss_before": 100, "file_bytes": 10**9, "weight_bytes": 4e8}
    tokens = cpu.N_PROMPT + cpu.N_DECODE + 1
    kv = tokens * 1_000_000 / (cpu.N_PROMPT + cpu.N_DECODE / 2)  # one megabyte in the middle of the answer
    weights, with_kv = cpu._ours([run | {"kv_bytes": kv, "read_gb_s": read} for read in (20.0, 40.0, 50.0)])[:2]
    assert (weights.name, weights.value, weights.ratio) == ("cpu/decode-of-read-loop", pytest.approx(20.0), pytest.approx(0.5))
    assert (with_kv.value, with_kv.ratio) == (pytest.approx(20.05), pytest.approx(20.05 / 40))
