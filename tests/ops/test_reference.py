"""What only the reference backend promises: its options, its poison, checks while an op runs."""

from __future__ import annotations

import numpy as np
import pytest

from metrale.backends.base import Backend
from metrale.backends.reference import ReferenceBackend
from metrale.errors import ConfigError, DeviceError, UnsupportedError
from tests.helpers import down, floats, poisoned, poisoned_kv, random_part, round_to, up, up_batch


def test_options() -> None:
    assert not ReferenceBackend().int8_activations
    assert ReferenceBackend(activations="int8").int8_activations
    for options in ({"activations": "int4"}, {"activation_dtype": "f64"}):
        with pytest.raises(ConfigError) as caught:
            ReferenceBackend(**options)  # type: ignore[arg-type]
        assert caught.value.code == f"config.{next(iter(options))}"


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_fresh_memory_is_poison(dtype: str) -> None:
    backend = ReferenceBackend(activation_dtype=dtype)
    assert np.isnan(down(backend, backend.alloc((3, 5), dtype))).all()
    assert (backend.download(backend.alloc((7,), "i32")) == -1).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_norms_round_before_or_after_the_weight(dtype: str) -> None:
    backend = ReferenceBackend(activation_dtype=dtype)
    rng = np.random.default_rng(1)
    x, weight = floats(backend, rng, 9, 57), rng.standard_normal(57).astype(np.float32)
    unit = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + np.float32(1e-5))
    device = up(backend, x), up(backend, weight, "f32")
    wants = {True: round_to(round_to(unit, dtype) * weight, dtype), False: round_to(unit * weight, dtype)}
    assert (wants[True] != wants[False]).any()
    for cast_first, want in wants.items():
        out = poisoned(backend, 9, 57)
        backend.stream.ops.rms_norm(out, *device, eps=1e-5, offset=0.0, cast_first=cast_first)
        np.testing.assert_array_equal(down(backend, out), want)


def test_ids_out_of_range_are_named(reference: Backend) -> None:
    ops, x = reference.stream.ops, up(reference, np.ones((2, 8), np.float32))
    weight = reference.pack([random_part(np.random.default_rng(1), "f32", 5, 8)])
    layer, heads = poisoned_kv(reference, 3, 1, 8), x.reshape(2, 1, 8)
    calls = (
        lambda: ops.embed(poisoned(reference, 2, 8), up(reference, [1, 5]), weight, scale=1.0),
        lambda: ops.embed(poisoned(reference, 2, 8), up(reference, [-1, 1]), weight, scale=1.0),
        lambda: ops.gather_rows(poisoned(reference, 1, 8), x, up(reference, [2])),
        lambda: ops.kv_zero(layer, up(reference, [3])),
        lambda: ops.kv_copy(layer, up(reference, [0]), up(reference, [3])),
        lambda: ops.rope(heads, heads, up(reference, np.ones((4, 8), np.float32)), up(reference, [0, 4])),
    )
    for call in calls:
        with pytest.raises(DeviceError) as caught:
            call()
        assert caught.value.code == "op.index"


def test_integers_must_be_int32_and_logits_float32(reference: Backend) -> None:
    ops = reference.stream.ops
    with pytest.raises(DeviceError, match="int32"):
        ops.argmax(reference.alloc((2,), "i64"), poisoned(reference, 2, 5))
    with pytest.raises(DeviceError, match="float32"):
        ops.argmax(reference.alloc((2,), "i32"), reference.alloc((2, 5), "bf16"))
    with pytest.raises(DeviceError, match="convert"):
        reference.upload(reference.alloc((2,), "i32"), np.zeros(2))


def test_heads_must_divide(reference: Backend) -> None:
    layer, q = poisoned_kv(reference, 2, 2, 8), poisoned(reference, 1, 3, 8)
    with pytest.raises(DeviceError) as caught:
        reference.stream.ops.attention(poisoned(reference, 1, 3, 8), q, layer, up_batch(reference, [0], [0]),
                                       up(reference, [[1]]), scale=1.0, window=None, softcap=None)
    assert caught.value.code == "op.shape"


def test_an_unknown_norm_scope(reference: Backend) -> None:
    x, w = poisoned(reference, 1, 1, 8), poisoned(reference, 8)
    with pytest.raises(UnsupportedError):
        reference.stream.ops.qk_norm(x, x, w, w, eps=1e-6, offset=0.0, cast_first=False, scope="row")
