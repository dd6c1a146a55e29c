"""Two ranks compute what one does, in every family; a model the ranks cannot share is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.backends.cpu.backend import CpuBackend
from metrale.backends.cpu.comm import thread_group
from metrale.backends.reference import ReferenceBackend, ReferenceComm
from metrale.errors import UnsupportedError
from tests.families import driver
from tests.families.tiny import Case, build, prompt, save
from tests.oracles import oracle_module

oracle_module("torch", why="the checkpoints are made by transformers")
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


def ranks(kind: str, size: int) -> list[Backend]:
    if kind == "reference":
        return [ReferenceBackend(comm=comm) for comm in ReferenceComm.group(size)]
    return [CpuBackend(threads=1, comm=comm) for comm in thread_group(size)]


def on_ranks(path: Path, ids: list[int], size: int, kind: str = "reference") -> list[Any]:
    """Return each rank's logits, or the exception it ended with."""
    backends = ranks(kind, size)
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            found[rank] = driver.logits(path, backends[rank], ids)
        except Exception as error:  # noqa: BLE001 - shown by the test
            found[rank] = error
            backends[rank].comm.abort()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for backend in backends:
        backend.close()
    return found


@pytest.mark.parametrize("kind", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_two_ranks_equal_one(case: Case, kind: str, tmp_path: Path) -> None:
    path, ids = save(build(case), tmp_path), prompt(length=37)
    want = driver.logits(path, ReferenceBackend(), ids)
    for got in on_ranks(path, ids, 2, kind):
        assert isinstance(got, np.ndarray), got
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("change", "size"), [({"intermediate_size": 59}, 2), ({}, 3)], ids=["feed-forward", "heads"])
def test_ranks_that_do_not_divide_are_refused(change: dict[str, int], size: int, tmp_path: Path) -> None:
    path = save(build(Case("llama", "Llama", {**EVEN, **change})), tmp_path)
    for error in on_ranks(path, prompt(length=5), size):
        assert isinstance(error, UnsupportedError)
        assert error.code == "weights.shard"
        assert "use fewer ranks" in str(error)


WIDE = {
    "hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 102, "attention_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_two_ranks_share_packed_weights_on_block_bounds(kind: str, tmp_path: Path) -> None:
    """A GGUF file: q and k rows are put back in order within each rank's heads, columns are cut between blocks."""
    oracle_module("gguf", why="the fixture is written by the gguf package")
    from tests.families import gguf_files

    path = gguf_files.write(build(Case("llama", "Llama", WIDE)), tmp_path / "tiny.gguf", block_format="q5_0")
    ids = prompt(length=21)
    want = driver.logits(path, ReferenceBackend(), ids)
    for got in on_ranks(path, ids, 2, kind):
        assert isinstance(got, np.ndarray), got
        np.testing.assert_allclose(got, want, rtol=0, atol=(1e-5 if kind == "reference" else 0.05) * np.abs(want).max())


def test_columns_that_cut_a_block_are_refused(tmp_path: Path) -> None:
    oracle_module("gguf", why="the fixture is written by the gguf package")
    from tests.families import gguf_files

    odd = Case("llama", "Llama", {**WIDE, "intermediate_size": 160})  # 80 columns a rank, blocks of 32
    path = gguf_files.write(build(odd), tmp_path / "tiny.gguf", block_format="q8_0")
    for error in on_ranks(path, prompt(length=5), 2):
        assert isinstance(error, UnsupportedError)
        assert error.code == "weights.shard"
        assert "ffn_down.weight" in str(error)
        assert "format's 32" in str(error)
