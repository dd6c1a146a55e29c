"""Every op with bf16 and float16 activations, against the reference with the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.backends.reference import ReferenceBackend
from tests.conftest import open_cuda
from tests.helpers import assert_close, down
from tests.ops.cases import CASES, arrays

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["bf16", "f16"])
def narrow(request: pytest.FixtureRequest) -> Iterator[Backend]:
    open_cuda(request.config).close()  # or skip
    from metrale.backends.cuda.backend import CudaBackend

    backend = CudaBackend(activation_dtype=request.param)
    yield backend
    backend.close()


@pytest.mark.parametrize("name", CASES)
def test_every_op_rounds_once(narrow: Any, name: str) -> None:
    reference = ReferenceBackend(activation_dtype=narrow.activation_dtype)
    want, got = (CASES[name](b, np.random.default_rng(1)) for b in (reference, narrow))
    for a, b in zip(arrays(want.args), arrays(got.args), strict=True):
        np.testing.assert_array_equal(down(reference, a), down(narrow, b))
    want.run(reference.stream.ops)
    got.run(narrow.stream.ops)
    for i in want.writes:
        for a, b in zip(arrays(want.args[i]), arrays(got.args[i]), strict=True):
            values, mine = down(reference, a), down(narrow, b)
            if values.dtype.kind == "f":
                # An op may round between its primitives where the reference does too, but a value near the middle of two
                # falls to either side: a second step of rounding.
                size = np.nanmax(np.abs(values), axis=-1, keepdims=True, initial=0, where=np.isfinite(values))
                assert_close(mine, values, narrow.activation_dtype, n=96, magnitude=4 * size)
            else:
                steps = np.abs(mine.astype(int) - values.astype(int)).max()
                assert steps <= (40 if values.dtype == np.int16 else 2 if values.dtype == np.int8 else 0)
