"""Open a checkpoint and understand it: container, config, spec, weight map; no large tensor is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from metrale.config.files import ModelConfig, load_config
from metrale.config.gguf import config_from_gguf
from metrale.config.spec import ModelSpec
from metrale.families import resolve
from metrale.formats import Checkpoint, open_checkpoint
from metrale.weights.index import TensorIndex
from metrale.weights.map import WeightMap


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint whose config is understood. Close it when the weights are packed.

    unread: config keys that nobody here read.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    spec: ModelSpec
    weights: WeightMap
    index: TensorIndex
    unread: tuple[str, ...]

    def close(self) -> None:
        """Close the checkpoint's files; may be called twice."""
        self.checkpoint.close()

    def __enter__(self) -> OpenedModel:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""
        self.close()


def open_model(path: str | os.PathLike[str]) -> OpenedModel:
    """Open a checkpoint: a GGUF file, a safetensors file or index beside its config.json, or a folder with either.

    Raises: WeightError and UnsupportedError of `metrale.formats.open_checkpoint`; ConfigError and UnsupportedError of the
            config readers.
    """
    checkpoint = open_checkpoint(path)
    try:
        if checkpoint.container == "gguf":
            config = config_from_gguf(checkpoint.metadata, checkpoint.tensors, str(checkpoint.path))
        else:
            config = load_config(Path(checkpoint.path).parent)
        resolved = resolve(config.mapping, config.source)
        return OpenedModel(checkpoint, config, resolved.spec, resolved.weights, TensorIndex(checkpoint), resolved.unread)
    except BaseException:
        checkpoint.close()
        raise
