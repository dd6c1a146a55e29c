"""Graph keys and the cache of captured steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metrale.backends.base import Backend, Graph, Program, Record, Stream
from metrale.errors import DeviceError
from metrale.model.gate import Gate
from metrale.model.graph_keys import CPU_LADDER, GPU_LADDER, GraphKey, decode_key, ladder_of
from metrale.model.graphs import GraphCache
from metrale.model.plan import RowSampling
from metrale.model.transformer import TransformerModel
from tests.model import tiny


class FakeGraph(Graph):
    def __init__(self) -> None:
        self.destroyed = 0

    def launch(self) -> None:
        assert not self.destroyed

    def destroy(self) -> None:
        self.destroyed += 1

    @property
    def program(self) -> Program:
        return Program(())


def key(rung: int) -> GraphKey:
    return GraphKey("decode", rung, False)


def test_the_cpu_counts_exactly_to_32_and_then_in_eights() -> None:
    assert [CPU_LADDER.rung(n, 4096) for n in (1, 2, 31, 32, 33, 40, 41, 1000)] == [1, 2, 31, 32, 40, 40, 48, 1000]
    assert CPU_LADDER.rung(33, 35) == 35


def test_a_gpu_pads_to_few_rungs() -> None:
    assert [GPU_LADDER.rung(n, 4096) for n in (1, 2, 3, 5, 9, 13, 97, 128, 129, 161)] == [
        1,
        2,
        4,
        8,
        12,
        16,
        128,
        128,
        160,
        192,
    ]
    assert GPU_LADDER.rung(5, 6) == 6
    assert ladder_of("cuda:0") is GPU_LADDER
    assert ladder_of("cpu") is ladder_of("reference") is CPU_LADDER


def test_every_rung_holds_its_rows() -> None:
    for ladder in (CPU_LADDER, GPU_LADDER):
        rungs = [decode_key(n, ladder, 300, logprobs=False).rung for n in range(1, 301)]
        assert all(n <= rung <= 300 for n, rung in enumerate(rungs, 1))
        assert rungs == sorted(rungs)


def test_the_least_recently_used_unpinned_graph_goes_first() -> None:
    cache, graphs = GraphCache(3), {n: FakeGraph() for n in range(1, 8)}
    for n in (1, 2, 3):
        cache.insert(key(n), graphs[n])
    assert cache.get(key(1)) is graphs[1]
    assert cache.get(key(9)) is None
    with cache.pinned(key(2)), cache.pinned(key(2)):
        cache.insert(key(4), graphs[4])
        assert [k.rung for k in cache.held()] == [2, 1, 4]
        assert graphs[3].destroyed == 1
        with cache.pinned(key(1)), cache.pinned(key(4)):
            cache.insert(key(5), graphs[5])
            assert len(cache) == 4
    cache.insert(key(6), graphs[6])
    assert [k.rung for k in cache.held()] == [4, 5, 6]
    replacement = FakeGraph()
    cache.insert(key(5), replacement)
    assert (graphs[5].destroyed, replacement.destroyed) == (1, 0)
    assert [k.rung for k in cache.held()] == [4, 6, 5]
    cache.drop_all()
    assert len(cache) == 0
    assert [graphs[n].destroyed for n in range(1, 7)] == [1] * 6


def test_a_failed_body_leaves_no_graph_and_no_capture(device: Backend) -> None:
    cache, stream = GraphCache(3), device.stream
    with pytest.raises(ZeroDivisionError):
        cache.capture(stream, key(1), lambda: 1 / 0)
    assert not stream.capturing
    assert len(cache) == cache.captures == 0


def test_a_capture_without_a_graph_is_an_error() -> None:
    class Empty(Stream):
        def begin_capture(self) -> None: ...

        def end_capture(self) -> Any:
            return None

        def abort_capture(self) -> None: ...

        @property
        def capturing(self) -> bool:
            return False

        def record(self) -> Any: ...

        def wait(self, event: Any) -> None: ...

        def synchronize(self) -> None: ...

    with pytest.raises(DeviceError, match="expected a graph"):
        GraphCache(1).capture(Empty(), key(1), lambda: None)


def test_reasons_against_graphs_add_up() -> None:
    gate = Gate(graphs=True)
    for reason in ("a", "b"):
        gate.suppress(reason)
    gate.allow("a")
    assert not gate.admits(key(1))
    gate.allow("b")
    gate.allow("never given")
    assert gate.admits(key(1))
    closed = Gate(graphs=False)
    closed.allow("configured")
    assert closed.reasons == ("configured",)
    assert not closed.admits(key(1))


# --- the model's graphs ----------------------------------------------------------------------------------------------


def shown(record: Record) -> tuple[Any, ...]:
    """Return everything a replay depends on besides memory: the op, its buffers by address and shape, its parameters."""

    def buffer(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x.__array_interface__["data"][0], x.shape, x.strides, str(x.dtype)
        if isinstance(x, tuple):
            return tuple(buffer(part) for part in x)
        return x if isinstance(x, int | float | str | None) else id(x)

    return record.op, tuple(buffer(b) for b in record.buffers), sorted(record.params.items())


def program(model: TransformerModel, wanted: GraphKey) -> list[tuple[Any, ...]]:
    graph = model._core.graphs.get(wanted)
    assert graph is not None
    return [shown(record) for record in graph.program.records]


@pytest.mark.parametrize("logprobs", [None, 3])
@pytest.mark.parametrize("rung", [1, 3])
def test_a_key_captured_from_two_host_states_is_one_program(device: Backend, rung: int, logprobs: int | None) -> None:
    model = tiny.open_model(device)
    wanted = GraphKey("decode", rung, logprobs is not None)
    programs = []
    for round_ in range(2):
        for i in range(4):
            sampling = RowSampling(temperature=float(round_), seed=i, repetition=1.0 + round_, logprobs=logprobs)
            tiny.start(model, i, tiny.prompt(5 + 17 * round_ + i, i), sampling)
        members = [3, 0, 2][:rung] if round_ else [0, 1, 2][:rung]
        model.decode_batch(members)
        programs.append(program(model, wanted))
        model.drop_graphs("test")
        for i in range(4):
            model.free_sequence(i)
    assert programs[0] == programs[1]
    assert len(programs[0]) > 20


def test_a_captured_step_begins_and_ends_as_designed(device: Backend) -> None:
    model = tiny.open_model(device)
    tiny.start(model, 1, tiny.prompt(5))
    model.decode(1)
    ops = [record[0] for record in program(model, key(1))]
    assert ops[:3] == ["rows_patch", "rows_begin", "embed"]
    assert ops[-4:] == ["penalize", "sample", "rows_commit", "publish"]
    assert "logprobs" not in ops


def test_logprobs_are_a_key_of_their_own(device: Backend) -> None:
    model = tiny.open_model(device)
    tiny.start(model, 1, tiny.prompt(5))
    tiny.start(model, 2, tiny.prompt(6), RowSampling(logprobs=0))
    model.decode(1)
    model.decode(2)
    assert model.graph_keys() == (("decode", 1, False), ("decode", 1, True))


def test_steady_decoding_stages_nothing_and_calls_little(device: Backend) -> None:
    model = tiny.open_model(device)
    tiny.start(model, 1, tiny.prompt(17))
    tiny.continue_(model, [1], 2)
    calls: list[str] = []
    device.fault = calls.append
    for _ in range(5):
        model.decode(1)
        assert not model._core.patches.pending
    device.fault = None
    assert [c for c in calls if c not in ("launch", "synchronize")] == []
    assert calls.count("launch") == 5


def test_eager_only_when_configured_so(device: Backend) -> None:
    model = tiny.open_model(device, graphs=False)
    tiny.generate(model, tiny.prompt(5), 4)
    assert (model.stats.graphs, model.stats.graph_captures, model.stats.eager_steps) == (0, 0, 3)
