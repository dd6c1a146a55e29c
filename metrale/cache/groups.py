"""KV groups: which layers share a block table, and how groups share one pool of equal-byte blocks.

Layers that see the whole sequence need every block; layers with a sliding window can give old blocks back. Both kinds
draw from one pool: a block is one page in each of `width` arrays, a group has at most `width` layers, and layer i of every
group stores to array i. Block numbers are unique over the groups, so two groups never meet in an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 8  # tables a row; more would cost more row state than the finer fit saves


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer stores a token: `heads` keys and values of `dim`; window None sees everything."""

    heads: int
    dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one block table. layers[i] stores to array arrays[i]. window: tokens after which blocks are released."""

    layers: tuple[int, ...]
    arrays: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Groups and arrays of a model. arrays[i] = (heads, dim); a block is one page in every array."""

    groups: tuple[CacheGroup, ...]
    arrays: tuple[tuple[int, int], ...]

    def group_of(self, layer: int) -> int:
        """Return the group of a layer."""
        return next(g for g, group in enumerate(self.groups) if layer in group.layers)

    def array_of(self, layer: int) -> int:
        """Return the array a layer stores to."""
        group = self.groups[self.group_of(layer)]
        return group.arrays[group.layers.index(layer)]

    def first_block(self, group: int, index: int, block_tokens: int) -> int:
        """Return the first logical block that a row at `index`, or any later one, still sees."""
        window = self.groups[group].window
        return 0 if window is None else max(0, index - window + 1) // block_tokens

    def sequence_blocks(self, tokens: int, chunk_tokens: int, block_tokens: int) -> int:
        """Return the most blocks, over all groups, that a sequence of `tokens` prefilled in such chunks holds at a time."""
        return sum(_group_blocks(g.window, tokens, chunk_tokens, block_tokens) for g in self.groups)


def plan_groups(layers: Sequence[LayerKV], *, context_tokens: int, chunk_tokens: int, block_tokens: int) -> CachePlan:
    """Choose the groups whose arrays need the fewest bytes for one sequence of the whole context.

    One group for all layers unless windows save memory: that needs layers of one shape, and a context longer than the
    window, a chunk and a block together. Ties go to fewer groups.
    """
    shapes = {(layer.heads, layer.dim) for layer in layers}
    kinds: dict[int | None, list[int]] = {}
    for i, layer in enumerate(layers):
        slides = layer.window is not None and layer.window + chunk_tokens + block_tokens < context_tokens
        kinds.setdefault(layer.window if slides else None, []).append(i)
    everything = CachePlan(
        (CacheGroup(tuple(range(len(layers))), tuple(range(len(layers))), None),),
        tuple((layer.heads, layer.dim) for layer in layers),
    )
    if len(shapes) > 1 or set(kinds) == {None}:
        return everything
    best = everything
    best_cost = (len(layers) * everything.sequence_blocks(context_tokens, chunk_tokens, block_tokens), 1)
    for width in range(1, len(layers) + 1):
        plan = _split(kinds, width, next(iter(shapes)))
        cost = (width * plan.sequence_blocks(context_tokens, chunk_tokens, block_tokens), len(plan.groups))
        if len(plan.groups) <= MAX_GROUPS and cost < best_cost:
            best, best_cost = plan, cost
    return best


def _split(kinds: dict[int | None, list[int]], width: int, shape: tuple[int, int]) -> CachePlan:
    """Cut every kind into groups of at most `width` layers."""
    groups: list[CacheGroup] = []
    for window, members in kinds.items():
        for start in range(0, len(members), width):
            part = tuple(members[start : start + width])
            groups.append(CacheGroup(part, tuple(range(len(part))), window))
    return CachePlan(tuple(groups), (shape,) * width)


def _group_blocks(window: int | None, tokens: int, chunk_tokens: int, block_tokens: int) -> int:
    """Return the blocks one group holds: all of them, or those of the window, a chunk and the two partial ends."""
    whole = -(-tokens // block_tokens)
    if window is None:
        return whole
    return min(whole, -(-(window + chunk_tokens) // block_tokens) + 1)
