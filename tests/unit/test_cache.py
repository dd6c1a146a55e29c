"""Blocks, tables, groups, identities and budgets: bookkeeping only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale.cache.block_table import BlockTable
from metrale.cache.blocks import DUMMY_BLOCK, BlockPool
from metrale.cache.budget import Demand, plan_blocks
from metrale.cache.groups import MAX_GROUPS, CachePlan, LayerKV, plan_groups
from metrale.cache.identity import BlockIdentity, Extra, identities
from metrale.errors import CapacityError, MetraleError

P = 16


def test_blocks_come_back_last_in_first_out() -> None:
    pool = BlockPool(6)
    a = pool.alloc(3)
    assert a == [1, 2, 3]
    pool.release(2)
    pool.release(1)
    assert pool.alloc(2) == [1, 2]
    assert pool.stats == (3, 2, 5, 3)


def test_an_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(CapacityError, match="expected 4 free blocks, got 3 of 3") as err:
        pool.alloc(4)
    assert err.value.code == "capacity.blocks"
    assert pool.free == 3
    assert not pool.has_fresh


@pytest.mark.parametrize("block", [DUMMY_BLOCK, 2, 7, -1])
def test_a_second_free_is_refused_and_changes_nothing(block: int) -> None:
    pool = BlockPool(5)
    pool.alloc(2)
    pool.release(2)
    before = (pool.stats, [pool.refs(b) for b in range(5)])
    for change in (pool.release, pool.share):
        with pytest.raises(MetraleError) as err:
            change(block)
        assert err.value.code == "cache.refs"
    assert (pool.stats, [pool.refs(b) for b in range(5)]) == before
    assert len({*pool.alloc(3)}) == 3


def test_fresh_blocks_stay_listed_until_zeroed() -> None:
    pool = BlockPool(6, born_zero=False)
    blocks = pool.alloc(3)
    pool.release(blocks[1])
    assert pool.fresh == (blocks[0], blocks[2])
    pool.mark_zeroed(pool.fresh)
    assert not pool.has_fresh
    assert pool.alloc(1) == [blocks[1]]
    assert pool.fresh == (blocks[1],)


def test_blocks_are_fresh_from_their_second_life_on() -> None:
    pool = BlockPool(6)
    blocks = pool.alloc(2)
    assert pool.fresh == ()
    pool.release(blocks[0])
    assert pool.alloc(2) == [blocks[0], 3]
    assert pool.fresh == (blocks[0],)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["alloc", "share", "release"]), st.integers(0, 8)), max_size=80))
def test_the_pool_agrees_with_a_count_of_references(actions: list[tuple[str, int]]) -> None:
    pool, counts = BlockPool(9), dict.fromkeys(range(1, 9), 0)
    for verb, n in actions:
        if verb == "alloc":
            if n <= pool.free:
                for block in pool.alloc(n):
                    assert counts[block] == 0
                    counts[block] = 1
        elif counts.get(n):
            if verb == "share":
                pool.share(n)
                counts[n] += 1
            else:
                counts[n] -= 1
                assert pool.release(n) == (counts[n] == 0)
        assert pool.free == sum(not c for c in counts.values())
        assert all(pool.refs(b) == c for b, c in counts.items())


def test_a_table_shares_slides_and_releases() -> None:
    pool = BlockPool(12)
    table, child = BlockTable(pool), BlockTable(pool)
    table.extend(pool.alloc(6))
    first = list(table.blocks)
    assert table.slide(2) == [0, 1]
    assert table.slide(2) == []
    table.share_into(child, 4)
    assert child.blocks == [0, 0, first[2], first[3]]
    assert (child.held, child.start, pool.refs(first[2])) == (2, 2, 2)
    table.release_all()
    table.release_all()
    assert pool.stats.used == 2
    child.release_all()
    assert pool.stats.used == 0


def check_plan(plan: CachePlan, layers: list[LayerKV]) -> None:
    assert sorted(i for g in plan.groups for i in g.layers) == list(range(len(layers)))
    assert len(plan.groups) <= MAX_GROUPS
    for i, layer in enumerate(layers):
        group = plan.groups[plan.group_of(i)]
        assert plan.arrays[plan.array_of(i)] == (layer.heads, layer.dim)
        assert group.window is None or group.window == layer.window
    for group in plan.groups:
        assert len(set(group.arrays)) == len(group.layers)


def test_full_layers_share_one_table() -> None:
    layers = [LayerKV(3, 8)] * 5
    plan = plan_groups(layers, context_tokens=4096, chunk_tokens=256, block_tokens=P)
    check_plan(plan, layers)
    assert len(plan.groups) == 1
    assert plan.sequence_blocks(33, 256, P) == 3


def test_windows_shorter_than_the_context_give_blocks_back() -> None:
    layers = [LayerKV(1, 16, None if i % 6 == 5 else 512) for i in range(26)]
    plan = plan_groups(layers, context_tokens=32768, chunk_tokens=256, block_tokens=P)
    check_plan(plan, layers)
    bytes_split = len(plan.arrays) * plan.sequence_blocks(32768, 256, P)
    assert bytes_split < 0.3 * 26 * 2048
    short = plan_groups(layers, context_tokens=700, chunk_tokens=256, block_tokens=P)
    check_plan(short, layers)
    assert len(short.groups) == 1


def test_layers_of_different_shape_keep_one_table() -> None:
    layers = [LayerKV(1, 16, 64), LayerKV(2, 16)] * 3
    plan = plan_groups(layers, context_tokens=4096, chunk_tokens=16, block_tokens=P)
    check_plan(plan, layers)
    assert plan.groups[0].window is None


@given(index=st.integers(0, 4000), window=st.integers(1, 600))
def test_a_window_never_releases_what_a_row_sees(index: int, window: int) -> None:
    layers = [LayerKV(1, 8, window), LayerKV(1, 8)]
    plan = plan_groups(layers, context_tokens=100_000, chunk_tokens=7, block_tokens=P)
    group = plan.group_of(0)
    first = plan.first_block(group, index, P)
    assert first * P <= max(0, index - window + 1) < (first + 1) * P


def test_equal_identities_need_equal_chains() -> None:
    tokens = tuple(range(40))
    a, b = (identities(tokens, Extra(), P) for _ in range(2))
    assert a == b
    assert hash(a[1]) == hash(b[1])
    assert [i.depth for i in a] == [0, 1]
    other_start = identities((99, *tokens[1:]), Extra(), P)
    assert other_start[1].tokens == a[1].tokens
    assert other_start[1] != a[1]
    for change in ({"salt": "x"}, {"adapter": (1, 2)}, {"media": (("h", 3),)}, {"kv_format": "f16"}):
        assert identities(tokens, replace(Extra(), **change), P)[0] != a[0]
    assert identities(tokens[16:], Extra(), P, parent=a[0])[0] == a[1]
    assert a[0] != "text"
    assert "depth=1" in repr(a[1])


def test_identities_are_compared_not_only_hashed() -> None:
    a, b = BlockIdentity(None, (1, 2), Extra()), BlockIdentity(None, (2, 1), Extra())
    b._hash = a._hash
    assert a != b
    assert len({a: 0, b: 1}) == 2


def test_long_chains_compare_without_recursion() -> None:
    tokens = tuple(range(16)) * 5000
    assert identities(tokens, Extra(), P)[-1] == identities(tokens, Extra(), P)[-1]


def test_the_budget_serves_all_rows_or_what_fits() -> None:
    plan = plan_groups([LayerKV(2, 8)] * 3, context_tokens=100, chunk_tokens=16, block_tokens=P)
    demand = Demand(context_tokens=100, chunk_tokens=16, rows=4, block_tokens=P)
    assert plan_blocks(plan, demand, block_bytes=1000, free_bytes=10**9, limit_bytes=None).blocks == 29
    tight = plan_blocks(plan, demand, block_bytes=1000, free_bytes=10**9, limit_bytes=10_500)
    assert (tight.blocks, tight.nbytes) == (10, 10_000)


def test_a_cache_that_is_too_small_says_the_numbers() -> None:
    plan = plan_groups([LayerKV(2, 8)] * 3, context_tokens=100, chunk_tokens=16, block_tokens=P)
    demand = Demand(context_tokens=100, chunk_tokens=16, rows=4, block_tokens=P)
    with pytest.raises(CapacityError, match=r"7 blocks of 1\.0 KiB.*context of at most 64 tokens") as err:
        plan_blocks(plan, demand, block_bytes=1024, free_bytes=5 * 1024, limit_bytes=None)
    assert err.value.code == "capacity.memory"
    with pytest.raises(CapacityError, match="lower the cache's memory"):
        plan_blocks(plan, demand, block_bytes=1024, free_bytes=10**4, limit_bytes=10**6)
    with pytest.raises(CapacityError, match=r"give it more memory, at least 8\.0 MiB$"):
        plan_blocks(plan, demand, block_bytes=2**20, free_bytes=2**20, limit_bytes=None)
    why = Demand(context_tokens=100, chunk_tokens=16, rows=4, block_tokens=P, chosen="the shortest")
    with pytest.raises(CapacityError, match=r"one context of 100 tokens, the shortest \(7 blocks"):
        plan_blocks(plan, why, block_bytes=1024, free_bytes=1024, limit_bytes=None)
