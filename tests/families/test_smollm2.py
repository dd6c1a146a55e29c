"""The real SmolLM2 file: its config, its tensors, and what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metrale import hub
from metrale.backends.reference import ReferenceBackend
from metrale.weights.loader import count_not_finite
from metrale.weights.preflight import preflight
from tests.families import driver
from tests.families.opened import open_model

NAME = "smollm2-135m"
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def path() -> Path:
    return hub.pull(NAME)


def test_its_config_and_tensors_agree(path: Path) -> None:
    with open_model(path) as opened:
        spec = opened.spec
        a = spec.layers[0].attention
        assert (spec.family, len(spec.layers), spec.hidden, a.heads, a.kv_heads, a.head_dim) == ("llama", 30, 576, 9, 3, 64)
        assert (spec.vocab, spec.tied, spec.max_context, opened.unread) == (49152, True, 8192, ())
        assert opened.config.generation.eos_ids == (2,)
        report = preflight(opened.index, opened.weights)
        assert report.problems == ()
        assert report.formats["q4_1"] > 200
        assert count_not_finite(opened.checkpoint.tensors["blk.7.ffn_down.weight"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_it_knows_the_capital_of_france(path: Path, activations: str) -> None:
    """Ids of "The capital of France is"; the reference backend is slow, so this is the whole conversation."""
    backend = ReferenceBackend(activations=activations)
    logits = driver.logits(path, backend, [504, 3575, 282, 4649, 314], max_context=16)
    assert int(logits[-1].argmax()) == 7042  # " Paris"
    assert np.isfinite(logits).all()
