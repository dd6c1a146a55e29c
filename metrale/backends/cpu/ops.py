"""All ops of the CPU backend."""

from __future__ import annotations

from metrale.backends.base import Ops
from metrale.backends.cpu.comm import CommOps
from metrale.backends.cpu.ops_attention import AttentionOps
from metrale.backends.cpu.ops_linear import LinearOps
from metrale.backends.cpu.ops_norm import NormOps
from metrale.backends.cpu.ops_rows import RowsOps
from metrale.backends.cpu.ops_sample import SampleOps


class CpuOps(RowsOps, NormOps, LinearOps, AttentionOps, SampleOps, CommOps, Ops):
    """Every op of the contract; the mixins come first, so that what they fuse wins over the contract's compositions."""
