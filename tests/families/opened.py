"""Open a checkpoint and understand it, as loading a model does, without a backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from metrale import families
from metrale.config.files import ModelConfig
from metrale.config.spec import ModelSpec
from metrale.formats import Checkpoint, open_checkpoint
from metrale.model.load import read_config
from metrale.weights.index import TensorIndex
from metrale.weights.map import WeightMap


class Opened(NamedTuple):
    checkpoint: Checkpoint
    config: ModelConfig
    spec: ModelSpec
    weights: WeightMap
    index: TensorIndex
    unread: tuple[str, ...]


@contextmanager
def open_model(path: Path) -> Iterator[Opened]:
    with open_checkpoint(path) as checkpoint:
        config = read_config(checkpoint, path)
        resolved = families.resolve(config.mapping, config.source)
        yield Opened(checkpoint, config, resolved.spec, resolved.weights, TensorIndex(checkpoint), resolved.unread)
