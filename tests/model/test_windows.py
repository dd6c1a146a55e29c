"""Windows: groups of layers give back blocks that no row sees, and the text is the same as if they kept them."""

from __future__ import annotations

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.model.core import Diagnosis
from metrale.model.plan import Fork, RowSampling
from metrale.model.transformer import TransformerModel
from tests.model import tiny

SPEC = tiny.spec(3, windows=(20, None, 20))


def opened(backend: Backend, *, sliding: bool, **options: int) -> TransformerModel:
    """Open the windowed model; a chunk as long as the context needs every block, so that nothing slides."""
    chunk = 16 if sliding else 224
    return tiny.open_model(
        backend, model_spec=SPEC, chunk_tokens=chunk, kv_blocks=None, diagnosis=Diagnosis(poison=True), **options
    )


def test_groups_share_one_pool(device: Backend) -> None:
    sliding, whole = opened(device, sliding=True), opened(device, sliding=False)
    assert len(whole._core.cache.groups) == 1
    windows = sorted((g.window or 0, len(g.layers)) for g in sliding._core.cache.groups)
    assert sum(n for _, n in windows) == 3
    assert {w for w, _ in windows} == {0, 20}
    width = len(sliding._core.cache.arrays)
    assert width * sliding.blocks_for(224) < 3 * whole.blocks_for(224)


@pytest.mark.parametrize("length", [5, 50, 100])
def test_given_back_blocks_change_nothing(device: Backend, kind: str, length: int) -> None:
    texts, logits = [], []
    for sliding in (True, False):
        model = opened(device, sliding=sliding)
        for i in (1, 2):
            tiny.start(model, i, tiny.prompt(length + i, i), RowSampling(temperature=0.7, seed=i))
            assert model.sequence(i).blocks <= model.blocks_for(length + i)
        texts.append(tiny.continue_(model, [1, 2], 60))
        logits.append(model.step_logits())
        for i in (1, 2):
            assert model.sequence(i).blocks <= model.blocks_for(224)
        saved = model.save_sequence(1)
        tiny.start(model, 3, tiny.prompt(90, 3))
        model.restore_sequence(saved)
        model.compact()
        texts[-1] += tiny.continue_(model, [2, 1], 30)
        for i in (1, 2, 3):
            model.free_sequence(i)
        assert model.free_blocks == model.limits.blocks
    assert texts[0] == texts[1]
    if kind == "cpu":
        np.testing.assert_array_equal(logits[0].view(np.int32), logits[1].view(np.int32))


def test_long_runs_hold_few_blocks(device: Backend) -> None:
    model = opened(device, sliding=True)
    tiny.start(model, 1, tiny.prompt(150))
    tiny.continue_(model, [1], 70)
    held = [table.held for table in model._core.sequences[1].tables]
    for group, count in zip(model._core.cache.groups, held, strict=True):
        assert count == (14 if group.window is None else count)
        assert count <= (14 if group.window is None else 4)


def test_a_fork_needs_the_window_of_its_parent(device: Backend) -> None:
    model = opened(device, sliding=True)
    draw = RowSampling(temperature=1.0, seed=5, choice=1)
    want = tiny.generate(model, tiny.prompt(70), 30, draw)
    tiny.start(model, 1, tiny.prompt(70))
    tiny.fork(model, 1, 2, draw)
    assert tiny.continue_(model, [2, 1], 30)[0] == want
    with pytest.raises(Exception, match="still holds the window") as err:
        model.fork_sequence(Fork(1, 3, 30, draw))
    assert getattr(err.value, "code", "") == "sequence.state"
