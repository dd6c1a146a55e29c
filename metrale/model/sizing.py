"""How long a context and how many K/V blocks a model is opened with."""

from __future__ import annotations

from typing import NamedTuple

from metrale.backends.base import BLOCK_TOKENS, Backend
from metrale.cache.budget import Budget, Demand, plan_blocks
from metrale.cache.groups import CachePlan, plan_groups
from metrale.config.engine import EngineConfig
from metrale.config.spec import ModelSpec
from metrale.errors import CapacityError
from metrale.log import get_logger
from metrale.model.net import kv_layers

log = get_logger(__name__)

FREE_SHARE = 0.5  # of the free memory that the K/V cache may plan with when the user names no size
SHORTEST_CONTEXT = 512  # below this an open model would be of no use: say that memory is short instead


class Sized(NamedTuple):
    """The groups, the blocks, and the longest token list."""

    plan: CachePlan
    budget: Budget
    context: int


def plan_cache(spec: ModelSpec, config: EngineConfig, backend: Backend) -> Sized:
    """Choose groups, blocks and context. A context that the user did not name shrinks until it fits in memory.

    Raises: CapacityError (``capacity.memory``) when the named context, or the shortest useful one, does not fit.
    """
    context = wanted = spec.max_context if config.max_context is None else config.max_context
    free = backend.memory()[0]
    while True:
        try:
            sized = _fit(spec, config, backend, context, free)
        except CapacityError:
            if config.max_context is not None or context <= SHORTEST_CONTEXT:
                raise
            context = max(context * 3 // 4, SHORTEST_CONTEXT)
        else:
            if context < wanted:
                log.warning("context: %d tokens of the model's %d, as the K/V cache's memory holds no more", context, wanted)
            return sized


def _fit(spec: ModelSpec, config: EngineConfig, backend: Backend, context: int, free: int) -> Sized:
    layers = kv_layers(spec, backend.comm.size)
    plan = plan_groups(layers, context_tokens=context, chunk_tokens=config.chunk_tokens, block_tokens=BLOCK_TOKENS)
    block_bytes = sum(backend.kv_block_bytes(heads, dim) for heads, dim in plan.arrays)
    limit = config.kv_memory_bytes if config.kv_blocks is None else config.kv_blocks * block_bytes
    chosen = "the model's own" if context == spec.max_context else "the shortest that is chosen when max_context is not set"
    chosen = chosen if config.max_context is None else ""
    demand = Demand(context, config.chunk_tokens, config.max_rows, BLOCK_TOKENS, chosen)
    budget = plan_blocks(
        plan, demand, block_bytes=block_bytes, free_bytes=int(free * FREE_SHARE) if limit is None else free, limit_bytes=limit
    )
    return Sized(plan, budget, context)
