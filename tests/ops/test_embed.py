"""Gathering rows of embeddings and of activations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale.backends.base import Backend
from tests.helpers import FORMATS, assert_close, block_size, down, floats, poisoned, random_part, up, widened


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 24.0])
def test_embed(backend: Backend, form: str, scale: float) -> None:
    rng = np.random.default_rng(3)
    part = random_part(rng, form, 51, 2 * block_size(form) if block_size(form) > 1 else 37)
    ids = np.array([50, 0, 17, 17, 16, 15, 32])
    out = poisoned(backend, 7, part.k)
    backend.stream.ops.embed(out, up(backend, ids), backend.pack([part]), scale=scale)
    assert_close(down(backend, out), widened(part)[ids] * scale, backend.activation_dtype)


def test_embed_from_stacked_parts(backend: Backend) -> None:
    rng = np.random.default_rng(3)
    parts = [random_part(rng, "q8_0", 19, 64), random_part(rng, "f16", 6, 64)]
    ids = np.arange(25)[::-1]
    out = poisoned(backend, 25, 64)
    backend.stream.ops.embed(out, up(backend, ids), backend.pack(parts), scale=1.0)
    assert_close(down(backend, out), np.concatenate([widened(p) for p in parts])[ids], backend.activation_dtype)


@given(rows=st.integers(1, 9), picked=st.lists(st.integers(-1, 8), min_size=1, max_size=12), width=st.sampled_from([1, 33, 64]))
def test_gather_rows(backend: Backend, rows: int, picked: list[int], width: int) -> None:
    picked = [min(p, rows - 1) for p in picked]
    x = floats(backend, np.random.default_rng(rows), rows, width)
    out = poisoned(backend, len(picked), width)
    backend.stream.ops.gather_rows(out, up(backend, x), up(backend, np.array(picked)))
    want = np.stack([x[p] if p >= 0 else np.full(width, np.nan, np.float32) for p in picked])
    np.testing.assert_array_equal(down(backend, out), want)
