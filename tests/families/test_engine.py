"""Every family through `LLM` on the CPU: transformers' 64 greedy tokens, and the same bits however they are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metrale import LLM
from tests.families.test_oracle import GREEDY
from tests.families.tiny import BASE, Case, build, prompt, save
from tests.oracles import oracle_module

oracle_module("torch", why="the oracle needs torch and transformers")
pytestmark = pytest.mark.oracle

END = BASE["eos_token_id"]
# The end token is banned for the oracle too (min_new_tokens).
GREEDILY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "bad_token_ids": (END,), "logprobs": 3}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"threads": 1}, {"graphs": False}, {"chunk_tokens": 1}, {"chunk_tokens": 7}, {"chunk_tokens": 16}, {"chunk_tokens": 33}
)  # fmt: skip


@pytest.mark.parametrize("case", GREEDY, ids=lambda case: case.id)
def test_text_and_bits(case: Case, tmp_path: Path) -> None:
    import torch

    model, ids = build(case), prompt(length=30)
    answer = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=64, min_new_tokens=64)[0].tolist()[len(ids) :]
    path = save(model, tmp_path)
    five = [ids, prompt(length=7), prompt(length=13), ids[3:], ids[:18]]
    with LLM(path, device="cpu", threads=2) as llm:
        whole = llm.generate(ids, max_tokens=64, **GREEDILY)
        assert list(whole.token_ids) == answer
        together = llm.generate(five, max_tokens=12, **GREEDILY)
        alone = [llm.generate(p, max_tokens=12, **GREEDILY) for p in five]
        assert [r.completions for r in together] == [r.completions for r in alone]
    for options in OPTIONS:
        with LLM(path, device="cpu", **{"threads": 2, **options}) as llm:
            assert llm.generate(ids, max_tokens=64, **GREEDILY).completions == whole.completions, options
