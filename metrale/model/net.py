"""The network as the model's concerns see it: the layer stack with its buffers, pages and tables."""

from __future__ import annotations

from collections.abc import Sequence

from metrale.backends.base import Array, Backend, KVLayer, Ops, RowBatch
from metrale.cache.groups import LayerKV
from metrale.config.spec import ModelSpec
from metrale.layers.stack import DenseModel
from metrale.weights.loader import Weights


def kv_layers(spec: ModelSpec, ranks: int) -> list[LayerKV]:
    """Return what each layer of one of `ranks` ranks stores in the K/V cache."""
    attention = (layer.attention for layer in spec.split(ranks).layers)
    return [LayerKV(a.kv_heads, a.head_dim, a.window) for a in attention]


class Net:
    """The layers, for steps of at most `rows` rows and `head_rows` rows of logits."""

    def __init__(self, backend: Backend, spec: ModelSpec, weights: Weights, *, context: int, rows: int, head_rows: int) -> None:
        """Wire the layers and allocate their buffers; `attach` gives them pages and tables."""
        self.stack = DenseModel(backend, spec, weights, context)
        self.buffers = self.stack.new_buffers(rows, head_rows)
        self.kv: Sequence[KVLayer] = ()
        self.tables: Sequence[Array] = ()

    def attach(self, kv: Sequence[KVLayer], tables: Sequence[Array]) -> None:
        """Set the pages and block tables of the layers, one a layer each."""
        self.kv, self.tables = kv, tables

    def forward(self, ops: Ops, batch: RowBatch) -> Array:
        """Run the layers over a step's rows; return the hidden states (T, H), which stand until the next forward."""
        return self.stack.forward(ops, self.buffers, batch, self.tables, self.kv)

    def head(self, ops: Ops, logits: Array, hidden: Array) -> None:
        """Write the logits (M, V) of rows (M, H) of the last forward; M at most `head_rows`."""
        self.stack.head(ops, self.buffers, logits, hidden)
