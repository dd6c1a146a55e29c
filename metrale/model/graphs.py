"""Captured steps: an LRU of graphs with pins, and the one place that captures.

Capture records and executes nothing, so the capturing step also launches what it captured, and a capture that failed
means that the step has not run: the caller then runs it eagerly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from metrale.backends.base import Graph, Stream
from metrale.errors import DeviceError
from metrale.log import get_logger
from metrale.model.graph_keys import GraphKey

log = get_logger(__name__)


class GraphCache:
    """Graphs by key, least recently used first. A pinned graph is in use and is neither evicted nor destroyed."""

    def __init__(self, capacity: int) -> None:
        """Hold at most `capacity` graphs; only pins let it grow beyond."""
        self._capacity = max(1, capacity)
        self._graphs: OrderedDict[GraphKey, Graph] = OrderedDict()
        self._pins: dict[GraphKey, int] = {}
        self.captures = 0
        self.replays = 0

    def __len__(self) -> int:
        """Return how many graphs are held."""
        return len(self._graphs)

    def held(self) -> tuple[GraphKey, ...]:
        """Return the keys held, least recently used first."""
        return tuple(self._graphs)

    def get(self, key: GraphKey) -> Graph | None:
        """Return a key's graph and make it the most recently used."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def insert(self, key: GraphKey, graph: Graph) -> None:
        """Add a graph as the most recently used; a graph it replaces is destroyed, and the oldest unpinned ones above capacity.

        When everything else is pinned the cache grows.
        """
        old = self._graphs.pop(key, None)
        if old is not None:
            _destroy(key, old)
        self._graphs[key] = graph
        excess = len(self._graphs) - self._capacity
        for victim in [k for k in self._graphs if k != key and not self._pins.get(k)][: max(0, excess)]:
            _destroy(victim, self._graphs.pop(victim))

    @contextmanager
    def pinned(self, key: GraphKey) -> Iterator[None]:
        """Keep a key's graph for the block; pins of one key add up."""
        self._pins[key] = self._pins.get(key, 0) + 1
        try:
            yield
        finally:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def drop_all(self) -> None:
        """Destroy every graph. The caller has settled: none is in flight."""
        while self._graphs:
            _destroy(*self._graphs.popitem())

    def capture(self, stream: Stream, key: GraphKey, body: Callable[[], None]) -> Graph:
        """Record `body` and keep the graph; nothing has run when this returns or raises.

        Raises: whatever the body or the backend raises; the recording is closed then and the stream usable.
        """
        with stream.capture() as recording:
            body()
        graph = recording.graph
        if graph is None:
            raise DeviceError(
                f"graph {key}: expected a graph from the capture, got none; report the backend", code="capture.empty"
            )
        self.insert(key, graph)
        self.captures += 1
        return graph


def _destroy(key: GraphKey, graph: Graph) -> None:
    """Destroy a graph; a device that cannot is logged, since nothing would be gained by keeping it."""
    try:
        graph.destroy()
    except DeviceError as error:
        log.warning("graph %s: not destroyed: %s", key, error)
