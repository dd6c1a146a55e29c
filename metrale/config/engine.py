"""`EngineConfig`: how an engine runs, and its validator. What a model computes stands in `ModelSpec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from metrale.errors import ConfigError

DEVICES = ("auto", "cpu", "reference", "cuda")
ACTIVATIONS = ("int8", "f32")
BLOCK_TOKENS = 16
MAX_ROWS = 4096


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs.

    device: "auto" is the CPU in this release; "cuda" runs plain kernels on a GPU; "reference" is the slow NumPy backend.
    threads: CPU threads (0: what the cgroup's quota allows). activations: "int8" multiplies quantized weights with int8
    activations, "f32" the same packed weights with float32 rows. max_context: tokens a sequence may hold (None: the
    model's own, bounded by memory). max_rows: most sequences in one step. kv_memory_bytes: size of the KV cache (None: from
    what is free). kv_blocks: the same as a number of blocks of 16 tokens; give at most one of the two. chunk_tokens: longest
    part of a prompt computed in one step. graphs: capture decode steps and replay them. seed: of requests that bring none
    (None: drawn at random). result_depth: steps whose results may be outstanding.
    """

    device: str = "auto"
    threads: int = 0
    activations: str = "int8"
    max_context: int | None = None
    max_rows: int = 16
    kv_memory_bytes: int | None = None
    kv_blocks: int | None = None
    chunk_tokens: int = 512
    graphs: bool = True
    seed: int | None = None
    result_depth: int = 2

    def problems(self) -> list[ConfigError]:
        """Return every contradiction as an error with its code, one sentence each; empty when valid."""
        found = (*_choices(self), *_counts(self), *_pairs(self))
        return [ConfigError(f"{name}: {text}", code=f"engine.{name}") for name, text in found]

    def validate(self) -> EngineConfig:
        """Return self, or raise one ConfigError that lists every contradiction and has the first one's code."""
        found = self.problems()
        if found:
            raise ConfigError("; ".join(str(error) for error in found), code=found[0].code)
        return self


Problem = tuple[str, str]


def _choices(c: EngineConfig) -> Iterator[Problem]:
    for name, allowed in (("device", DEVICES), ("activations", ACTIVATIONS)):
        value = getattr(c, name)
        if value not in allowed:
            yield name, f"expected one of {', '.join(allowed)}, got {value!r}; choose one of them"
    if not isinstance(c.graphs, bool):
        yield "graphs", f"expected True or False, got {c.graphs!r}; correct it"


def _counts(c: EngineConfig) -> Iterator[Problem]:
    bounds: tuple[tuple[str, int, int | None, bool], ...] = (
        ("threads", 0, 1024, False),
        ("max_context", 1, None, True),
        ("max_rows", 1, MAX_ROWS, False),
        ("kv_memory_bytes", 1, None, True),
        ("kv_blocks", 2, None, True),
        ("chunk_tokens", 1, 2**16, False),
        ("seed", 0, 2**64 - 1, True),
        ("result_depth", 1, 64, False),
    )
    for name, low, high, optional in bounds:
        value: Any = getattr(c, name)
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            bound = f"of at least {low}" if high is None else f"from {low} to {high}"
            yield name, f"expected an integer {bound}, got {value!r}; correct it"


def _pairs(c: EngineConfig) -> Iterator[Problem]:
    if c.kv_memory_bytes is not None and c.kv_blocks is not None:
        yield "kv_blocks", "expected it or kv_memory_bytes, got both; give one of them"
