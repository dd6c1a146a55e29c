"""SmolLM2's numbers: our greedy tokens and our distributions against transformers over the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from metrale import LLM
from tests.oracles import oracle_module
from tests.smollm2.conftest import NEW_TOKENS, Text

pytestmark = [pytest.mark.model, pytest.mark.oracle]

NEAR = 1e-3  # logits: float32 sums in another order
LEAST_AGREEMENT = 0.95
MOST_KL = 0.005


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities, row by row."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(total).astype(np.float32))


class Comparison(NamedTuple):
    """Position by position: is the best token the same, and KL(want || got) in nats."""

    same: np.ndarray
    kl: np.ndarray


def compare(want: tuple[np.ndarray, ...], got: list[np.ndarray]) -> Comparison:
    """Compare logits of several texts with the oracle's."""
    same: list[np.ndarray] = []
    kl: list[np.ndarray] = []
    for w, g in zip(want, got, strict=True):
        assert w.shape == g.shape
        assert np.isfinite(g).all()
        p, q = log_softmax(w), log_softmax(g)
        same.append(w.argmax(axis=1) == g.argmax(axis=1))
        kl.append((np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64))
    return Comparison(np.concatenate(same), np.concatenate(kl))


@pytest.fixture(scope="module")
def our_logits(llm: LLM, texts: tuple[Text, ...]) -> list[np.ndarray]:
    """The int8 engine's logits at every token of every text."""
    return [llm.model.score(text.tokens) for text in texts]


def test_each_token_is_the_oracles_choice_up_to_a_near_tie(
    texts: tuple[Text, ...], oracle_logits: tuple[np.ndarray, ...]
) -> None:
    assert len(texts) == 20
    assert max(len(text.prompt) for text in texts) > 280
    for text, logits in zip(texts, oracle_logits, strict=True):
        assert len(text.answer) == NEW_TOKENS
        rows = logits[len(text.prompt) - 1 : -1]
        short = rows.max(axis=1) - rows[np.arange(NEW_TOKENS), list(text.answer)]
        assert short.max() <= NEAR, f"token {int(short.argmax())} of {text.prompt[:8]}: {short.max()} below the maximum"


def test_float32_logits_agree(exact: LLM, texts: tuple[Text, ...], oracle_logits: tuple[np.ndarray, ...]) -> None:
    for text, want in list(zip(texts, oracle_logits, strict=True))[::5]:
        assert np.abs(exact.model.score(text.tokens) - want).max() <= NEAR


def test_int8_activations_keep_the_distribution(
    our_logits: list[np.ndarray], oracle_logits: tuple[np.ndarray, ...]
) -> None:
    found = compare(oracle_logits, our_logits)
    assert found.same.mean() >= LEAST_AGREEMENT
    assert 0 <= found.kl.mean() <= MOST_KL


@pytest.mark.slow
def test_int8_activations_are_no_worse_than_llama_cpp(
    smollm2_path: Path, texts: tuple[Text, ...], our_logits: list[np.ndarray], oracle_logits: tuple[np.ndarray, ...]
) -> None:
    llama_cpp = oracle_module("llama_cpp", why="the judge is in the peers extra")
    peer = llama_cpp.Llama(str(smollm2_path), n_ctx=1024, n_threads=2, logits_all=True, verbose=False)
    theirs = []
    for text in texts:
        peer.reset()
        peer.eval(list(text.tokens))
        theirs.append(np.array(peer.scores[: len(text.tokens)], np.float32))
    peer.close()
    ours, others = compare(oracle_logits, our_logits), compare(oracle_logits, theirs)
    assert others.same.mean() > 0.9, "the peer was asked something else"
    assert ours.same.mean() >= others.same.mean()
    assert ours.kl.mean() <= others.kl.mean()
    print(f"agreement {ours.same.mean():.4f} against {others.same.mean():.4f}, "  # noqa: T201  shown by -s, for the README
          f"mean KL {ours.kl.mean():.5f} against {others.kl.mean():.5f}")
