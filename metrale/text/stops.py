"""Stop strings over a stream of text: found across token borders, never shown, never late.

The strings of a request become one automaton (Aho and Corasick 1975), so the cost a character does not grow with their
number. Text is held back exactly while it could still turn into a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from metrale.errors import RequestError


class StopHit(NamedTuple):
    """Where a text stopped.

    which: index of the stop string. start, end: its first character and the one after its last, counted from the start
    of the text. start_token, end_token: the `push` calls (counted from 0) that brought its first and its last character:
    tokens after end_token are not part of the answer, and those before start_token are wholly text.
    """

    stop: str
    which: int
    start: int
    end: int
    start_token: int
    end_token: int


class StopStrings:
    """The stop strings of a request, immutable; `StopMatcher` runs one text through them.

    Raises: RequestError (``sampling.stop``) for an empty string, lone surrogates, or anything but strings.
    """

    __slots__ = ("_depth", "_edges", "_fail", "_firsts", "_found", "stops")

    def __init__(self, stops: Iterable[str]) -> None:
        if isinstance(stops, str):
            stops = (stops,)
        self.stops = tuple(_checked(stop) for stop in stops)
        # State 0 is the root; a state is the longest suffix of the text that begins a stop string.
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[int] = [-1]  # index of the longest stop string that ends here, -1 for none
        for index, stop in enumerate(self.stops):
            self._insert(stop, index)
        self._fail = [0] * len(self._edges)
        self._link()
        self._firsts = frozenset(self._edges[0])

    def _insert(self, stop: str, index: int) -> None:
        state = 0
        for character in stop:
            following = self._edges[state].get(character)
            if following is None:
                following = len(self._edges)
                self._edges[state][character] = following
                self._edges.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(-1)
            state = following
        if self._found[state] < 0:
            self._found[state] = index

    def _link(self) -> None:
        """Set each state's fallback, the next shorter suffix, breadth first."""
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._edges[state].items():
                queue.append(following)
                self._fail[following] = self.step(self._fail[state], character)
            if self._found[state] < 0:
                self._found[state] = self._found[self._fail[state]]

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while True:
            following = self._edges[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def touches(self, text: str) -> bool:
        """Say whether a stop string could begin in this text."""
        return not self._firsts.isdisjoint(text)

    def found(self, state: int) -> int:
        """Return the index of the longest stop string that ends in this state, or -1."""
        return self._found[state]

    def depth(self, state: int) -> int:
        """Return how many of the last characters must be held back in this state."""
        return self._depth[state]


class StopMatcher:
    """One text on its way to the reader.

    The stop string that is complete first wins; of several that end at the same character the longest. That depends on the
    text alone, not on how it was cut into tokens.
    """

    __slots__ = ("_held", "_seen", "_sources", "_state", "_stops", "_token", "hit")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self._seen = 0  # characters taken in
        self._token = -1
        # (first character, push number) of the pushes that brought what is held
        self._sources: deque[tuple[int, int]] = deque()
        self.hit: StopHit | None = None

    def push(self, text: str) -> str:
        """Take the text of one token, possibly empty, and return what may be shown.

        After a stop string was completed (`hit` is set) everything further is dropped.
        """
        if self.hit is not None:
            return ""
        self._token += 1
        if not text:
            return ""
        if self._state == 0 and not self._stops.touches(text):
            self._seen += len(text)
            return text
        self._sources.append((self._seen, self._token))
        stops, state = self._stops, self._state
        for position, character in enumerate(text):
            state = stops.step(state, character)
            index = stops.found(state)
            if index >= 0:
                return self._stop(index, text, position + 1)
        self._state = state
        self._seen += len(text)
        known = self._held + text
        shown = len(known) - stops.depth(state)
        self._held = known[shown:]
        if self._held:
            self._forget(self._seen - len(self._held))
        else:
            self._sources.clear()
        return known[:shown]

    def flush(self) -> str:
        """End the text and return what was held back; "" after a stop. Harmless twice."""
        held, self._held, self._state = self._held, "", 0
        self._sources.clear()
        return held

    def _stop(self, index: int, text: str, taken: int) -> str:
        stop = self._stops.stops[index]
        end = self._seen + taken
        start = end - len(stop)
        known = self._held + text[:taken]
        self._forget(start)
        self.hit = StopHit(stop, index, start, end, self._sources[0][1], self._token)
        self._held, self._state = "", 0
        self._sources.clear()
        return known[: len(known) - len(stop)]

    def _forget(self, first: int) -> None:
        """Drop the sources that end before character `first`; those left are adjacent and reach it."""
        sources = self._sources
        while len(sources) > 1 and sources[1][0] <= first:
            sources.popleft()


def _checked(stop: object) -> str:
    if not isinstance(stop, str) or not stop:
        raise RequestError(f"stop: expected non-empty strings, got {stop!r}; leave it out to stop at the end token only",
                           code="sampling.stop")
    try:
        stop.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"stop: expected Unicode text, got a lone surrogate in {stop!r}; no answer can contain it",
                           code="sampling.stop") from error
    return stop
