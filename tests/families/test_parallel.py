"""Two ranks compute what one does, in every family; a model the ranks cannot share is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metrale.backends.reference import ReferenceBackend, ReferenceComm
from metrale.errors import UnsupportedError
from tests.families import driver
from tests.families.tiny import Case, build, prompt, save

pytest.importorskip("torch", reason="the checkpoints are made by transformers")
pytestmark = pytest.mark.oracle

EVEN = {"intermediate_size": 58, "vocab_size": 102}
CASES = (
    Case("llama-bias", "Llama", {**EVEN, "attention_bias": True, "mlp_bias": True}),
    Case("llama-tied", "Llama", {**EVEN, "tie_word_embeddings": True}),
    Case("llama-odd-vocabulary", "Llama", {**EVEN, "vocab_size": 101}),
    Case("mistral", "Mistral", {**EVEN, "sliding_window": 11}),
    Case("qwen2", "Qwen2", EVEN),
    Case("qwen3", "Qwen3", EVEN),
    Case("gemma2", "Gemma2", {**EVEN, "sliding_window": 17, "final_logit_softcapping": 2.0}),
    Case("gemma3", "Gemma3", {**EVEN, "sliding_window": 15}),
    Case("phi3", "Phi3", EVEN),
    Case("olmo2-bias", "Olmo2", {**EVEN, "attention_bias": True}),
)  # fmt: skip


def on_ranks(path: Path, ids: list[int], size: int) -> list[Any]:
    """Return each rank's logits, or the exception it ended with."""
    group = ReferenceComm.group(size)
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            found[rank] = driver.logits(path, ReferenceBackend(comm=group[rank]), ids)
        except Exception as error:  # noqa: BLE001 - shown by the test
            found[rank] = error
            group[rank].abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_two_ranks_equal_one(case: Case, tmp_path: Path) -> None:
    path, ids = save(build(case), tmp_path), prompt(length=37)
    want = driver.logits(path, ReferenceBackend(), ids)
    for got in on_ranks(path, ids, 2):
        assert isinstance(got, np.ndarray), got
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("change", "size"), [({"intermediate_size": 59}, 2), ({}, 3)], ids=["feed-forward", "heads"])
def test_ranks_that_do_not_divide_are_refused(change: dict[str, int], size: int, tmp_path: Path) -> None:
    path = save(build(Case("llama", "Llama", {**EVEN, **change})), tmp_path)
    for error in on_ranks(path, prompt(length=5), size):
        assert isinstance(error, UnsupportedError)
        assert error.code == "weights.shard"
        assert "use fewer ranks" in str(error)
