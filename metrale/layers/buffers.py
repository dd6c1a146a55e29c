"""`StepBuffers`: every activation buffer of a step, allocated once; `StepViews`: its first rows, as the layers name them.

Layers run one after the other and share the buffers. A buffer that feeds matrices exists as a QTensor, as floats, or as
both, by what those matrices read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from metrale.backends.base import Backend

_MOST_VIEWS: Final = 64


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Widths and needs of a model on one rank.

    heads, kv_heads: this rank's; all_heads, all_kv_heads, first_head, first_kv_head: of the qkv product, which may hold
    the heads of all ranks. plain_x, quantized_x: whether any matrix reads x as floats, as a QTensor. scratch_bytes: for
    one row. logits_part: columns of a split float head (0: none). logits_pairs: columns of an int8 head (0: none).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    all_heads: int
    all_kv_heads: int
    first_head: int
    first_kv_head: int
    middle: int
    quantized_normed: bool
    quantized_heads: bool
    plain_middle: bool
    quantized_middle: bool
    logits_part: int
    logits_pairs: int


@dataclass(frozen=True, slots=True)
class StepViews:
    """The buffers cut to T rows; None where the model does not need one.

    residual, normed, product (T, H); qkv (T, (Hq + 2 Hk) D); q_all (T, Hq, D), k_all (T, Hk, D) of the product, q, k, v
    this rank's heads of it; heads (T, Hq, D) and heads_flat (T, Hq D) the attention output; middle (T, I); *_q the same
    as QTensor; scratch uint8; logits_part (T, V / ranks) float32; head_q (2 T, H) and logits_pairs (2 T, V / ranks): the
    rows of an int8 head, then what their quantization left.
    """

    residual: Any
    normed: Any
    normed_q: Any
    product: Any
    qkv: Any
    q_all: Any
    k_all: Any
    q: Any
    k: Any
    v: Any
    heads: Any
    heads_flat: Any
    heads_q: Any
    middle: Any
    middle_q: Any
    scratch: Any
    logits_part: Any
    head_q: Any
    logits_pairs: Any


class StepBuffers:
    """Activation buffers for up to `rows` rows, and for the logits of up to `head_rows`.

    One step at a time may use them. Views are made on the host and remembered by T; a captured step keeps its own.
    """

    def __init__(self, backend: Backend, sizes: BufferSizes, rows: int, head_rows: int, scratch_bytes: int) -> None:
        """Allocate. Raises: CapacityError ``capacity.memory``; CaptureError inside a capture."""
        form, b = backend.activation_dtype, sizes
        self.sizes, self.rows, self.head_rows = sizes, rows, head_rows

        def plain(needed: bool, width: int) -> Any:
            return backend.alloc((rows, width), form) if needed else None

        def quantized(needed: bool, width: int) -> Any:
            return backend.alloc_q(rows, width) if needed else None

        self.residual = plain(True, b.hidden)
        self.product = plain(True, b.hidden)
        self.normed = plain(True, b.hidden)  # the head reads it, as floats or to quantize it twice
        self.normed_q = quantized(b.quantized_normed, b.hidden)
        self.qkv = plain(True, (b.all_heads + 2 * b.all_kv_heads) * b.head_dim)
        self.heads = plain(True, b.heads * b.head_dim)
        self.heads_q = quantized(b.quantized_heads, b.heads * b.head_dim)
        self.middle = plain(b.plain_middle, b.middle)
        self.middle_q = quantized(b.quantized_middle, b.middle)
        self.scratch = backend.alloc((max(scratch_bytes, 4),), "u8")
        self.logits_part = backend.alloc((head_rows, b.logits_part), "f32") if b.logits_part else None
        self.head_q = backend.alloc_q(2 * head_rows, b.hidden) if b.logits_pairs else None
        self.logits_pairs = backend.alloc((2 * head_rows, b.logits_pairs), "f32") if b.logits_pairs else None
        self._views: dict[int, StepViews] = {}

    def at(self, rows: int) -> StepViews:
        """Return the views of the first `rows` rows."""
        found = self._views.get(rows)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[rows] = self._cut(rows)
        return found

    def _cut(self, t: int) -> StepViews:
        b = self.sizes
        d = b.head_dim

        def plain(buffer: Any) -> Any:
            return None if buffer is None else buffer[:t]

        def quantized(buffer: Any) -> Any:
            return None if buffer is None else buffer.rows(0, t)

        qkv = self.qkv[:t]
        k_at, v_at = b.all_heads * d, (b.all_heads + b.all_kv_heads) * d
        q_all = qkv[:, :k_at].reshape(t, b.all_heads, d)
        k_all = qkv[:, k_at:v_at].reshape(t, b.all_kv_heads, d)
        v_all = qkv[:, v_at:].reshape(t, b.all_kv_heads, d)
        kv_heads = slice(b.first_kv_head, b.first_kv_head + b.kv_heads)
        return StepViews(
            residual=plain(self.residual),
            normed=plain(self.normed),
            normed_q=quantized(self.normed_q),
            product=plain(self.product),
            qkv=qkv,
            q_all=q_all,
            k_all=k_all,
            q=q_all[:, b.first_head : b.first_head + b.heads],
            k=k_all[:, kv_heads],
            v=v_all[:, kv_heads],
            heads=self.heads[:t].reshape(t, b.heads, d),
            heads_flat=self.heads[:t],
            heads_q=quantized(self.heads_q),
            middle=plain(self.middle),
            middle_q=quantized(self.middle_q),
            scratch=self.scratch,
            logits_part=None if self.logits_part is None else self.logits_part[:t],
            head_q=None if self.head_q is None else self.head_q.rows(0, 2 * t),
            logits_pairs=None if self.logits_pairs is None else self.logits_pairs[: 2 * t],
        )
