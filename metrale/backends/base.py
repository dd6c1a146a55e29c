"""The backend contract: what a device must offer, and every op with its shapes.

Dimension letters, fixed here and used everywhere:

    T  rows of a step (one row = one token of one sequence)   H  hidden size
    R  rows of the row state (most sequences at once)         I  intermediate size
    Hq, Hk  query and key/value heads    D  head size         V  vocabulary
    P  tokens of a KV block              B  blocks of a table  N, K  outputs and inputs of a matrix

Rules of every op:

* Destination first, buffers owned by the caller, nothing allocated: the eager and the captured path are one path.
* Inside a capture an op is recorded and *not* executed; scalars are frozen, buffers are read again at every replay.
* A row's result depends on that row alone (its tokens, its K/V, its state), never on the rows beside it. On the CPU that
  holds bit for bit.
* Padding rows have ``seq = -1``: they read row 0 of nothing, write only the dummy block, and their outputs are finite
  or NaN but never trap. K/V past a row's index is never read (tests fill it with NaN).
* Float buffers are float32 on the CPU; the GPU may use bf16 or f16 for activations. Sums are float32 everywhere.
* Shapes are checked before anything runs: `DeviceError` with code ``op.shape`` names the op, expected and got. (A fused
  op made of primitives checks as they do, one after the other, so its earlier primitives may have run.)
* Scalars (eps, factor, scale, cap) are rounded to float32 first.

`Ops` has two tiers. *Primitives* are abstract. *Fused ops* have a base implementation here that calls the primitives;
a backend overrides what it fuses. Layers call the fused ops.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from metrale.errors import DeviceError

BLOCK_TOKENS = 16  # P
QUANT_BLOCK = 32  # activations share one scale over this many inputs
SUM_BLOCK = 16  # and carry integer sums over this many

# Kinds of norm (families.md section 1): cast to the activation dtype before or after the weight; plain or 1 + weight.
ACTIVATIONS = ("silu", "gelu_tanh")


@runtime_checkable
class Array(Protocol):
    """What the contract asks of a device buffer; NumPy and CuPy arrays have it."""

    shape: tuple[int, ...]
    dtype: Any
    nbytes: int

    def __getitem__(self, key: Any) -> Any: ...

    def reshape(self, *shape: int) -> Any:
        """Return a view of another shape."""


class QTensor(NamedTuple):
    """Rows quantized to int8 for the quantized products.

    data (T, K) int8; scales (T, K/32) float32; sums (T, K/16) int16, the integer sums of `data`.
    """

    data: Any
    scales: Any
    sums: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (T, K)."""
        return tuple(self.data.shape)

    def rows(self, start: int, stop: int) -> QTensor:
        """Return the view of rows [start, stop)."""
        return QTensor(self.data[start:stop], self.scales[start:stop], self.sums[start:stop])


class WeightPart(NamedTuple):
    """One matrix of a checkpoint on the host, rows = outputs.

    format: "f32", "f16", "bf16" or a block format of `metrale.quant.blocks`.
    data: (N, K) float32/float16/uint16 for dense formats, (N, row_bytes) uint8 for block formats; may be memory-mapped.
    """

    format: str
    n: int
    k: int
    data: Any


class PackedWeight(abc.ABC):
    """A matrix in a backend's own layout: parts stacked along N, kept in their packed format."""

    n: int
    k: int
    formats: tuple[str, ...]  # one a part
    part_rows: tuple[int, ...]  # N of each part
    nbytes: int
    bias: Any | None  # (N,) float32 or None

    @property
    @abc.abstractmethod
    def takes_q(self) -> bool:
        """Say whether every part may be multiplied with a QTensor (all parts are block formats)."""


class KVLayer(NamedTuple):
    """One layer's pages; the layout of k and v is the backend's own (`Backend.kv_read` shows it plainly)."""

    k: Any
    v: Any
    heads: int  # Hk
    dim: int  # D


class RowBatch(NamedTuple):
    """The rows of a step; int32 device arrays of length T.

    ids: token ids. seq: row of the row state (block table to use), -1 for padding. index: place in the token list
    (K/V place and causal mask). position: what rope sees.
    """

    ids: Any
    seq: Any
    index: Any
    position: Any

    def rows(self, start: int, stop: int) -> RowBatch:
        """Return the view of rows [start, stop)."""
        return RowBatch(*(a[start:stop] for a in self))


# --- row state -----------------------------------------------------------------------------------------------------

MAX_BIAS = 320  # logit-bias, bad-token and min-tokens entries a row (OpenAI allows 300)
MAX_TOP_LOGPROBS = 20

# One int32 word each, in this order, a row. float fields hold the bits of a float32.
ROW_FIELDS = (
    "token",  # the id the next decode step feeds
    "index",  # its place: the launched length before that step
    "limit",  # tokens the reserved blocks can hold; a row at its limit turns to the dummy block and raises `flag`
    "flag",  # bit 0: ran out of room
    "delta",  # position - index
    "seed_lo",
    "seed_hi",
    "choice",  # which of n
    "temperature",  # float; 0: greedy
    "top_k",  # 0: off
    "top_p",  # float; 1: off
    "min_p",  # float; 0: off
    "repetition",  # float; 1: off
    "presence",  # float; 0: off
    "frequency",  # float; 0: off
    "prompt_len",  # presence and frequency count only what came after
    "num_bias",  # entries used in the bias table
    "logprobs",  # -1: none; k: chosen token's and k best
)
FIELD = {name: i for i, name in enumerate(ROW_FIELDS)}


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Word offsets inside the row-state buffer, a flat int32 array.

    order (R,): step row -> state row, -1 padding | fields (R, F) | bias ids, bias values, bias until (R, MAX_BIAS) each |
    tables (groups, R, max_blocks) | history (R, max_tokens).
    """

    rows: int
    max_blocks: int
    max_tokens: int
    groups: int = 1

    @property
    def fields(self) -> int:
        """Return the word offset of the field table."""
        return self.rows

    @property
    def bias_ids(self) -> int:
        """Return the word offset of the bias ids; values (float bits) and `until` indices follow."""
        return self.fields + self.rows * len(ROW_FIELDS)

    @property
    def bias_values(self) -> int:
        """Return the word offset of the bias values, float32 bits; -inf bans the token."""
        return self.bias_ids + self.rows * MAX_BIAS

    @property
    def bias_until(self) -> int:
        """Return the word offset of the token index below which an entry applies."""
        return self.bias_values + self.rows * MAX_BIAS

    @property
    def tables(self) -> int:
        """Return the word offset of the block tables."""
        return self.bias_until + self.rows * MAX_BIAS

    @property
    def history(self) -> int:
        """Return the word offset of the token histories (prompt and output)."""
        return self.tables + self.groups * self.rows * self.max_blocks

    @property
    def words(self) -> int:
        """Return the size of the buffer in int32 words."""
        return self.history + self.rows * self.max_tokens

    def field(self, row: int, name: str) -> int:
        """Return the word offset of one field of one row."""
        return self.fields + row * len(ROW_FIELDS) + FIELD[name]

    def table(self, group: int, row: int, block: int = 0) -> int:
        """Return the word offset of an entry of a block table."""
        return self.tables + (group * self.rows + row) * self.max_blocks + block


class RowState(NamedTuple):
    """The row state on the device."""

    words: Any  # (layout.words,) int32
    layout: RowLayout

    def table(self, group: int) -> Any:
        """Return the block tables of a group, (R, max_blocks) int32 view."""
        lay = self.layout
        start = lay.tables + group * lay.rows * lay.max_blocks
        return self.words[start : start + lay.rows * lay.max_blocks].reshape(lay.rows, lay.max_blocks)


class PatchRing(NamedTuple):
    """Pinned memory the device reads patches from: entries (depth, 2 + 2 * capacity) int32.

    Word 0: number of (offset, value) pairs; word 1: unused; then the pairs. `cursor` (1,) int32 on the device counts the
    steps that consumed an entry; a step uses entry ``cursor % depth`` and sets its count to zero (so that an untouched
    entry means "no change") before it advances the cursor.
    """

    entries: Any
    cursor: Any


class ResultRing(NamedTuple):
    """Pinned memory the device writes results to, one entry a step; entry = sequence number % depth.

    header (depth, 4) int32: sequence number (written last), rows T, flags, unused. ids (depth, R) int32; column t is the
    step's row t.
    logprob (depth, R) float32; top_ids and top_logprobs (depth, R, MAX_TOP_LOGPROBS), written for rows that ask.
    `cursor` (1,) int32 on the device: the next sequence number, from 1.
    """

    header: Any
    ids: Any
    logprob: Any
    top_ids: Any
    top_logprobs: Any
    cursor: Any


# --- streams, graphs -----------------------------------------------------------------------------------------------


class Graph(abc.ABC):
    """A captured step; holds every buffer it names alive."""

    @abc.abstractmethod
    def launch(self) -> None:
        """Queue the step on the stream it was captured on.

        Raises: DeviceError when the graph was destroyed or a kernel failed.
        """

    @abc.abstractmethod
    def destroy(self) -> None:
        """Release the graph; harmless twice. Never called while a launch is in flight."""

    @property
    @abc.abstractmethod
    def program(self) -> Program:
        """Return what was recorded."""


class Event(abc.ABC):
    """A point in a stream."""

    @abc.abstractmethod
    def query(self) -> bool:
        """Say whether the point has been passed; raises DeviceError after a fault."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait on the host until the point has been passed."""


class Capture:
    """The handle inside ``with stream.capture() as cap``; `graph` is set when the block ends well."""

    def __init__(self) -> None:
        self.graph: Graph | None = None


class Stream(abc.ABC):
    """An ordered queue of work."""

    ops: Ops

    @abc.abstractmethod
    def begin_capture(self) -> None:
        """Start recording; from here on ops execute nothing. Raises CaptureError if already recording."""

    @abc.abstractmethod
    def end_capture(self) -> Graph:
        """Stop recording and instantiate. Raises CaptureError if the recording was broken."""

    @abc.abstractmethod
    def abort_capture(self) -> None:
        """Discard an open recording; harmless when there is none."""

    @property
    @abc.abstractmethod
    def capturing(self) -> bool:
        """Say whether a recording is open."""

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Record the block. An exception discards the recording before it propagates; the stream stays usable."""
        cap = Capture()
        self.begin_capture()
        try:
            yield cap
            cap.graph = self.end_capture()
        finally:
            if cap.graph is None:
                self.abort_capture()

    @abc.abstractmethod
    def record(self) -> Event:
        """Return an event at the current end of the queue. Raises CaptureError inside a capture (one step, one stream)."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for `event`. Raises CaptureError inside a capture."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait on the host until the queue is empty. Raises CaptureError inside a capture, DeviceError after a fault."""


class Record(NamedTuple):
    """One recorded op: its contract name, its buffers (destination first) and its frozen parameters."""

    op: str
    buffers: tuple[Any, ...]
    params: dict[str, Any]


class Program(NamedTuple):
    """What a capture recorded, in order; the circuit rewrites it, backends may lower it."""

    records: tuple[Record, ...]


# --- communication ---------------------------------------------------------------------------------------------------


class Comm(abc.ABC):
    """Ranks that run the same plan. Its collectives are ops: they can be captured."""

    rank: int
    size: int


class SoloComm(Comm):
    """One rank."""

    rank = 0
    size = 1


# --- the ops ---------------------------------------------------------------------------------------------------------


def check_shape(op: str, what: str, expected: tuple[int | None, ...], got: Sequence[int]) -> None:
    """Raise DeviceError (``op.shape``) unless `got` matches `expected` (None matches any size)."""
    if len(expected) != len(got) or any(e is not None and e != g for e, g in zip(expected, got, strict=False)):
        shown = tuple("any" if e is None else e for e in expected)
        message = f"{op}: expected {what} of shape {shown}, got {tuple(got)}; this is a bug in the caller"
        raise DeviceError(message, code="op.shape")


class Ops(abc.ABC):
    """Every op of the dense families. `x` arguments are float arrays unless a QTensor is allowed by name."""

    comm: Comm

    # -- rows: host words in, step rows out --

    @abc.abstractmethod
    def rows_patch(self, state: RowState, ring: PatchRing) -> None:
        """Apply the ring's current entry to the state's words, zero its count, advance the ring's cursor."""

    @abc.abstractmethod
    def rows_begin(self, batch: RowBatch, state: RowState) -> None:
        """Fill a decode batch from the state: row i of T takes state row ``order[i]``.

        Writes ids, seq, index and position (= index + delta), and the id into the row's history. A row with order -1
        gets ids 0, seq -1, index 0, position 0. So does a row whose index has reached its limit; it also gets bit 0 of
        its flag, and its history stays.
        """

    @abc.abstractmethod
    def rows_prefill(self, batch: RowBatch, state: RowState) -> None:
        """Write a prefill batch's ids into the histories: history[seq, index] = id. Padding rows write nothing."""

    @abc.abstractmethod
    def rows_commit(self, ids: Array, seq: Array, index: Array, state: RowState) -> None:
        """Make sampled ids the rows' next tokens: state row seq[i] gets token = ids[i], index = index[i] + 1.

        Shapes: ids, seq, index (T,) int32; seq -1 skips the row.
        """

    @abc.abstractmethod
    def publish(self, ring: ResultRing, ids: Array, seq: Array, state: RowState) -> None:
        """Write one result entry, then advance the cursor.

        Ids first, then rows and flags (of all R state rows, or-ed: a row that ran out of room has seq -1 here), then,
        after a fence, the sequence number. Shapes: ids, seq (T,) int32, T <= R
        """

    # -- rows of numbers --

    @abc.abstractmethod
    def embed(self, out: Array, ids: Array, weight: PackedWeight, *, scale: float) -> None:
        """Gather rows of an embedding: out (T, H) = weight[ids] * scale. ids (T,) int32; weight (V, H)."""

    @abc.abstractmethod
    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        """Copy rows: out (M, W) = x[rows]; rows (M,) int32; -1 copies nothing."""

    @abc.abstractmethod
    def add(self, residual: Array, x: Array) -> None:
        """Add in place: residual (T, H) += x (T, H)."""

    @abc.abstractmethod
    def scale(self, x: Array, *, factor: float) -> None:
        """Multiply in place by a constant: x (T, H) *= factor."""

    @abc.abstractmethod
    def rms_norm(self, out: Array | QTensor, x: Array, weight: Array, *, eps: float, offset: float, cast_first: bool) -> None:
        """Normalise rows: out = x / sqrt(mean(x^2) + eps) * (offset + weight).

        Shapes:   out, x (T, H) (or (T, heads, D): the last axis is the normalised one); weight (H,) float32
        Numerics: float32 inside; `cast_first` rounds to the activation dtype before the weight (no effect in float32).
                  A QTensor `out` is quantized from the float32 result.
        Source:   Zhang and Sennrich 2019; families.md section 1
        """

    @abc.abstractmethod
    def quantize(self, out: QTensor, x: Array) -> None:
        """Quantize rows to int8: scale = amax/127 of each 32 inputs, q = round-half-even(x * (127 / amax)).

        amax 0 (or so small that 127 / amax overflows) gives scale 0 and q 0; a block with a NaN gets a NaN scale, one with
        an infinity an infinite scale, both with q 0.
        """

    @abc.abstractmethod
    def quantize_rest(self, out: QTensor, x: Array, q: QTensor) -> None:
        """Quantize what a quantization left: out = quantize(x - q), q's values and the difference rounded to float32.

        The sum of the products of q and out has nearly twice the bits of one. out, q (T, K); x (T, K).
        """

    @abc.abstractmethod
    def linear(self, out: Array, x: Array | QTensor, weight: PackedWeight, *, lora: Any | None = None) -> None:
        """Multiply: out (T, N) = x (T, K) @ weight.T + bias.

        Numerics: float32 sums over K in one fixed order. A QTensor needs ``weight.takes_q``.
        Raises:   DeviceError ``op.dtype`` for a QTensor with a dense weight; UnsupportedError for `lora` here.
        """

    @abc.abstractmethod
    def act_mul(self, out: Array | QTensor, gate_up: Array, *, act: str) -> None:
        """Gate: out (T, I) = act(gate_up[:, :I]) * gate_up[:, I:]. act: "silu" or "gelu_tanh"."""

    @abc.abstractmethod
    def softcap(self, x: Array, *, cap: float) -> None:
        """Cap in place: x = cap * tanh(x / cap)."""

    # -- attention --

    @abc.abstractmethod
    def qk_norm(self, q: Array, k: Array, q_weight: Array, k_weight: Array, *, eps: float, offset: float,
                cast_first: bool, scope: str) -> None:
        """Normalise queries and keys in place.

        Shapes: q (T, Hq, D), k (T, Hk, D), views into one qkv buffer; scope "head": weights (D,), each head alone;
                scope "full": weights (Hq*D,) and (Hk*D,), all heads of a row together (OLMo-2)
        """

    @abc.abstractmethod
    def rope(self, q: Array, k: Array, table: Array, position: Array) -> None:
        """Rotate halves in place: dims [0, d/2) pair with [d/2, d), d = rotated dims; the rest stays.

        Shapes: q (T, Hq, D), k (T, Hk, D); table (positions, d) float32 = cos (d/2) then sin (d/2); position (T,)
        Source: Su et al. 2021, in the rotate-half layout
        """

    @abc.abstractmethod
    def kv_write(self, layer: KVLayer, k: Array, v: Array, batch: RowBatch, tables: Array) -> None:
        """Store K and V of the rows: block tables[seq, index // P], offset index % P; padding rows write block 0 (dummy).

        Shapes: k, v (T, Hk, D); tables (R, max_blocks) int32
        """

    @abc.abstractmethod
    def attention(self, out: Array, q: Array, layer: KVLayer, batch: RowBatch, tables: Array, *, scale: float,
                  window: int | None, softcap: float | None) -> None:
        """Attend over the pages: row t sees indices (index - window, index] of its sequence.

        Shapes:   out, q (T, Hq, D); query head h reads K/V head h // (Hq // Hk)
        Numerics: scores and sums float32; with `softcap` scores become cap * tanh(score / cap) after scaling.
                  Online softmax over blocks in ascending order, so chunking a prompt changes no bit on the CPU.
                  Padding rows (seq -1) write zeros.
        """

    @abc.abstractmethod
    def kv_zero(self, layer: KVLayer, blocks: Array) -> None:
        """Zero whole blocks (birth of a block); blocks (M,) int32, -1 skips."""

    @abc.abstractmethod
    def kv_copy(self, layer: KVLayer, src: Array, dst: Array) -> None:
        """Copy whole blocks src[i] -> dst[i]; (M,) int32, -1 skips."""

    # -- choosing tokens --

    @abc.abstractmethod
    def penalize(self, logits: Array, seq: Array, index: Array, state: RowState, counts: Array) -> None:
        """Apply the rows' penalties, bias and bans to float32 logits (T, V) in place.

        index (T,): place of the token that produced the logits; the history holds [0, index]. Order: repetition
        (divide positive, multiply negative logits of every token seen), subtract frequency * count + presence of tokens
        after the prompt, then bias entries with index + 1 < until (add; -inf bans). counts (T, V) int32 scratch: zero on entry,
        zero on return.
        Source: repetition: Keskar et al. 2019; presence and frequency: the OpenAI API's definition
        """

    @abc.abstractmethod
    def sample(self, ids: Array, logits: Array, seq: Array, index: Array, state: RowState, scratch: Array) -> None:
        """Choose an id a row by Gumbel-max over filtered logits.

        ids (T,) int32; logits (T, V) float32 (not changed); scratch (T, V) float32.
        temperature 0: argmax, ties to the lowest id. Otherwise, in this order: top-k, top-p (the smallest set of most
        likely tokens, at temperature and over what top-k left, whose probability reaches top_p, at least one; ties at
        the edge of either go to the lowest id), min-p (probability at least min_p times the best), then argmax of
        logit / T + g, with g = -log(-log(u)), u from Philox4x32-10 with key = seed (lo, hi) and counter =
        (token id // 4, index + 1, choice, purpose 0); lane token id % 4; u = (x + 0.5) * 2^-32. u and g need float64: in
        float32 the largest x round to u = 1 and g = inf. NaN and -inf are never chosen; a row of nothing else, and rows
        with seq -1, get id 0.
        Source: Salmon et al. 2011 (Philox); Gumbel-max, Maddison et al. 2014
        """

    @abc.abstractmethod
    def argmax(self, ids: Array, logits: Array) -> None:
        """Choose the largest of each row: ids (T,) int32; ties to the lowest id; NaN never wins; all NaN or -inf: 0."""

    @abc.abstractmethod
    def logprobs(self, ring: ResultRing, logits: Array, ids: Array, seq: Array, state: RowState) -> None:
        """Write log-softmax of the chosen ids and the k best of each asking row into the ring's next entry.

        `logits` are the model's own (before penalties and temperature); NaN counts as -inf, ties go to the lowest id.
        The entry is the one the next `publish` completes; nothing else of it is written.
        """

    # -- collectives (identity when comm.size is 1) --

    @abc.abstractmethod
    def all_reduce(self, x: Array) -> None:
        """Sum x over the ranks in place, in rank order."""

    @abc.abstractmethod
    def all_gather(self, out: Array, x: Array) -> None:
        """Concatenate along the last axis in rank order: out (T, N * size), x (T, N)."""

    # -- scratch sizes --

    def mlp_up_scratch_bytes(self, rows: int, weight: PackedWeight) -> int:
        """Return the scratch `mlp_up` needs for `rows` rows: the float32 gate and up halves."""
        return 4 * rows * weight.n

    def linear_residual_scratch_bytes(self, rows: int, weight: PackedWeight) -> int:
        """Return the scratch `linear_residual` needs for `rows` rows: the product before it is added."""
        return 4 * rows * weight.n

    # -- fused ops: what layers call --

    def add_rms_norm(self, out: Array | QTensor, residual: Array, x: Array, weight: Array, *, eps: float, offset: float,
                     cast_first: bool) -> None:
        """Add x to the residual, then normalise the sum into `out`."""
        self.add(residual, x)
        self.rms_norm(out, residual, weight, eps=eps, offset=offset, cast_first=cast_first)

    def norm_add(self, residual: Array, x: Array, weight: Array, *, eps: float, offset: float, cast_first: bool) -> None:
        """Add the normalised x to the residual (post-norm families); x is overwritten."""
        self.rms_norm(x, x, weight, eps=eps, offset=offset, cast_first=cast_first)
        self.add(residual, x)

    def qkv_rope_write(self, q: Array, k: Array, v: Array, layer: KVLayer, batch: RowBatch, tables: Array,
                       rope_table: Array | None, norms: QkNorm | None) -> None:
        """Finish a projected qkv: normalise q and k, rotate them, store K and V; q stays in place.

        Shapes: q (T, Hq, D), k and v (T, Hk, D), views into the projection's output
        """
        if norms is not None:
            self.qk_norm(q, k, norms.q, norms.k, eps=norms.eps, offset=norms.offset, cast_first=norms.cast_first,
                         scope=norms.scope)
        if rope_table is not None:
            self.rope(q, k, rope_table, batch.position)
        self.kv_write(layer, k, v, batch, tables)

    def linear_residual(self, residual: Array, x: Array | QTensor, weight: PackedWeight, *, scratch: Array,
                        lora: Any | None = None) -> None:
        """Add a product to the residual: residual (T, N) += x @ weight.T + bias (the product is rounded first)."""
        rows = int(residual.shape[0])
        out = scratch_view(scratch, rows, weight.n)
        self.linear(out, x, weight, lora=lora)
        self.add(residual, out)

    def mlp_up(self, out: Array | QTensor, x: Array | QTensor, weight: PackedWeight, *, act: str, scratch: Array,
               lora: Any | None = None) -> None:
        """Multiply by the fused gate and up matrices and gate: out (T, I); weight parts (I, K) gate then (I, K) up."""
        rows = int(out.shape[0])
        gate_up = scratch_view(scratch, rows, weight.n)
        self.linear(gate_up, x, weight, lora=lora)
        self.act_mul(out, gate_up, act=act)

    def head(self, logits: Array, x: Array | QTensor, weight: PackedWeight, *, scale: float, cap: float | None) -> None:
        """Project to float32 logits (T, V), times `scale`, capped by cap * tanh(x / cap) when asked."""
        self.linear(logits, x, weight)
        if scale != 1.0:
            self.scale(logits, factor=scale)
        if cap is not None:
            self.softcap(logits, cap=cap)


class QkNorm(NamedTuple):
    """Weights and kind of the query and key norms (see `Ops.qk_norm`)."""

    q: Any
    k: Any
    eps: float
    offset: float
    cast_first: bool
    scope: str


def scratch_view(scratch: Array, rows: int, columns: int) -> Any:
    """Return the first rows*columns float32 of a uint8 scratch buffer as a (rows, columns) view.

    Raises: DeviceError ``op.scratch`` when the scratch is too small.
    """
    need = 4 * rows * columns
    if scratch.nbytes < need:
        message = f"scratch: expected at least {need} bytes, got {scratch.nbytes}; size it by *_scratch_bytes"
        raise DeviceError(message, code="op.scratch")
    flat: Any = scratch[:need]
    return flat.view("float32").reshape(rows, columns)


# --- the backend -------------------------------------------------------------------------------------------------------


class Backend(abc.ABC):
    """One device: memory, streams, packing. Two backends may live in one process; nothing here is global."""

    name: str
    comm: Comm
    activation_dtype: str  # "f32", "bf16", "f16"
    int8_activations: bool  # whether products take QTensor by default (engine option `activations`)
    # Tests set this to make a call fail: called with the name of each op and backend call before it does anything.
    fault: Callable[[str], None] | None = None

    @property
    @abc.abstractmethod
    def stream(self) -> Stream:
        """Return the default stream; its `ops` run there."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """Return a further stream."""

    @abc.abstractmethod
    def alloc(self, shape: Sequence[int], dtype: str, *, zero: bool = False) -> Any:
        """Allocate a device array; dtype as in `metrale.dtypes`.

        Raises: CaptureError (``capture.alloc``) inside a capture; CapacityError (``capacity.memory``) when it does not fit.
        """

    def alloc_q(self, rows: int, k: int) -> QTensor:
        """Allocate a QTensor of (rows, k), its pads zeroed."""
        return QTensor(self.alloc((rows, k), "i8", zero=True), self.alloc((rows, k // QUANT_BLOCK), "f32", zero=True),
                       self.alloc((rows, k // SUM_BLOCK), "i16", zero=True))

    @abc.abstractmethod
    def alloc_pinned(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate zeroed host memory the device can read and write (page-locked on a GPU), as a NumPy array.

        It outlives every copy that reads it: the backend holds it until `close`.
        """

    @abc.abstractmethod
    def device_view(self, pinned: Any) -> Any:
        """Return the device's view of pinned memory (the same array on the CPU)."""

    @abc.abstractmethod
    def upload(self, dst: Any, src: Any, stream: Stream | None = None) -> None:
        """Copy a host array into a device array of the same shape. Raises CaptureError inside a capture."""

    @abc.abstractmethod
    def download(self, src: Any, stream: Stream | None = None) -> Any:
        """Return a NumPy copy of a device array, after the stream's queued work. Raises CaptureError inside a capture."""

    @abc.abstractmethod
    def pack(self, parts: Sequence[WeightPart], bias: Any | None = None) -> PackedWeight:
        """Pack matrices of equal K, stacked along N, into this backend's layout; the source may be dropped afterwards.

        Raises: UnsupportedError (``weights.format``) for a format without a kernel.
        """

    @abc.abstractmethod
    def unpack(self, weight: PackedWeight) -> Any:
        """Return the matrix as float32 (N, K) on the host: for tests and `inspect`."""

    @abc.abstractmethod
    def alloc_kv(self, blocks: int, heads: int, dim: int) -> KVLayer:
        """Allocate one layer's pages, zeroed; block 0 is the dummy block."""

    @abc.abstractmethod
    def kv_read(self, layer: KVLayer, block: int) -> tuple[Any, Any]:
        """Return one block's K and V on the host as (P, Hk, D) float32 each."""

    @abc.abstractmethod
    def kv_block_bytes(self, heads: int, dim: int) -> int:
        """Return the bytes of one block of one layer, K and V together."""

    @abc.abstractmethod
    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes the device (or the cgroup) offers."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything; harmless twice; later use raises DeviceError (``device.closed``)."""
