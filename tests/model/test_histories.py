"""Whatever happens to sequences, in whatever order, each one's text is the text it has alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metrale.backends.base import Backend
from metrale.errors import CapacityError
from metrale.model.core import Diagnosis
from metrale.model.plan import Chunk, Fork, RowSampling, SequenceSpec
from metrale.model.transformer import TransformerModel
from tests.model import tiny
from tests.model.conftest import OpenBackend

STEPS = 24
SPECS = {"full": tiny.spec(1), "windows": tiny.spec(2, windows=(20, None))}
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["start", "chunk", "decode", "decode", "decode", "fork", "save", "free", "move"]), st.integers(0, 63)
    ),
    min_size=10,
    max_size=50,
)


def prompt(name: int) -> tuple[int, ...]:
    return tiny.prompt(1 + (name * 13) % 60, name % 8)


def sampling(name: int, choice: int) -> RowSampling:
    return RowSampling(temperature=0.9, seed=name % 5, choice=choice, presence=0.2 * (name % 2))


class World:
    """Sequences under random actions; every text is compared with the one it has alone."""

    def __init__(self, backend: Backend, spec: Any) -> None:
        options: dict[str, Any] = {"model_spec": spec, "chunk_tokens": 16, "diagnosis": Diagnosis(guards=True, poison=True)}
        self.model: TransformerModel = tiny.open_model(backend, kv_blocks=24, max_context=96, **options)
        self.lonely: TransformerModel = tiny.open_model(backend, max_context=96, kv_blocks=None, **options)
        self.alone = cache(lambda name, choice: tiny.generate(self.lonely, prompt(name), STEPS, sampling(name, choice)))
        self.names: dict[int, tuple[int, int]] = {}
        self.next_id = 0

    def members(self, number: int, *, prefilled: bool) -> list[int]:
        found = [i for i in self.names if self.model.sequence(i).prefilled == prefilled]
        return found[number % len(found) :] + found[: number % len(found)] if found else []

    def do(self, action: str, number: int) -> None:
        try:
            getattr(self, action)(number)
        except CapacityError:
            if self.names:
                self.free(number)

    def start(self, number: int) -> None:
        self.next_id += 1
        self.model.alloc_sequence(SequenceSpec(self.next_id, prompt(number), len(prompt(number)), sampling(number, 0)))
        self.names[self.next_id] = (number, 0)

    def chunk(self, number: int) -> None:
        for i in self.members(number, prefilled=False)[:1]:
            view = self.model.sequence(i)
            stop = min(len(view.tokens), view.launched + 1 + number % 16)
            self.model.prefill_chunk(Chunk(i, view.launched, stop))

    def decode(self, number: int) -> None:
        ready = [i for i in self.members(number, prefilled=True) if self.made(i) < STEPS]
        self.model.decode_batch(ready[: 1 + number % 6])

    def fork(self, number: int) -> None:
        ready = [i for i in self.members(number, prefilled=True) if self.made(i) <= 3]
        for parent in ready[:1]:
            name, _ = self.names[parent]
            self.next_id += 1
            child = self.next_id
            self.model.fork_sequence(Fork(parent, child, len(prompt(name)) - 1, sampling(name, 1 + number % 3)))
            self.names[child] = (name, 1 + number % 3)

    def save(self, number: int) -> None:
        for i in self.members(number, prefilled=bool(number % 3))[:1]:
            saved = self.model.save_sequence(i)
            self.model.restore_sequence(saved)

    def free(self, number: int) -> None:
        ids = list(self.names)
        if ids:
            self.model.free_sequence(ids[number % len(ids)])
            del self.names[ids[number % len(ids)]]

    def move(self, number: int) -> None:
        taken = {self.model.sequence(i).row for i in self.names}
        empty = [row for row in range(self.model.limits.rows) if row not in taken]
        for i in list(self.names)[:1]:
            if empty:
                self.model.compact_sequence(i, empty[number % len(empty)])
        if number % 4 == 0:
            self.model.compact()

    def made(self, seq_id: int) -> int:
        return len(self.model.sequence(seq_id).tokens) - len(prompt(self.names[seq_id][0]))

    def clear(self) -> None:
        for i in self.model.live_sequences():
            self.model.free_sequence(i)
        self.names.clear()

    def check(self) -> None:
        for i, (name, choice) in self.names.items():
            got = list(self.model.sequence(i).tokens[len(prompt(name)) :])
            assert got == self.alone(name, choice)[: len(got)], (name, choice)
        assert self.model.check_guards() == ()
        self.clear()
        assert self.model.free_blocks == self.model.limits.blocks
        assert self.model.free_rows == self.model.limits.rows


@pytest.mark.parametrize("layers", list(SPECS))
def test_any_history_gives_the_same_texts(open_backend: OpenBackend, layers: str) -> None:
    world = World(open_backend(), SPECS[layers])

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(ACTIONS)
    def run(actions: list[tuple[str, int]]) -> None:
        world.clear()
        for action, number in actions:
            world.do(action, number)
        world.check()

    run()
