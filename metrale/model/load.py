"""From a checkpoint on disk to an open model: config → spec → weights → TransformerModel, and the tokenizer beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from metrale import families
from metrale.backends.base import Backend
from metrale.config.engine import EngineConfig
from metrale.config.files import GenerationDefaults, ModelConfig, load_config
from metrale.config.gguf import config_from_gguf
from metrale.formats import Checkpoint, open_checkpoint
from metrale.log import get_logger
from metrale.model.core import Diagnosis
from metrale.model.transformer import TransformerModel
from metrale.weights.index import TensorIndex
from metrale.weights.loader import load_weights

if TYPE_CHECKING:
    from metrale.text.tokenizer import Tokenizer

log = get_logger(__name__)

Progress = Callable[[int, int], None]


class Loaded(NamedTuple):
    """An open checkpoint. tokenizer: None when it brings none. eos_ids: all ids that config, generation config or tokenizer
    say end a text, ascending.
    """

    model: TransformerModel
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    eos_ids: tuple[int, ...]


def load_model(
    path: Path,
    engine_config: EngineConfig,
    backend: Backend,
    progress: Progress | None = None,
    *,
    diagnosis: Diagnosis | None = None,
) -> TransformerModel:
    """Open the model of a checkpoint (a safetensors folder or file, or a GGUF file) on a backend.

    progress: called with (bytes done, bytes in all) while weights are packed. The backend stays the caller's, also when
    this raises; what was allocated goes with it.
    Raises: ConfigError, WeightError, UnsupportedError for a checkpoint that cannot be run; CapacityError ``capacity.memory``.
    """
    with open_checkpoint(path) as checkpoint:
        return _model(checkpoint, read_config(checkpoint, path), engine_config, backend, progress, diagnosis)


def load_checkpoint(path: Path, engine_config: EngineConfig, backend: Backend, progress: Progress | None = None) -> Loaded:
    """Open a checkpoint's model, tokenizer and generation defaults. Raises: like `load_model`, and what `Tokenizer` raises."""
    with open_checkpoint(path) as checkpoint:
        config = read_config(checkpoint, path)
        tokenizer = _tokenizer(checkpoint, path)
        model = _model(checkpoint, config, engine_config, backend, progress, None)
    ends = {*config.generation.eos_ids, *(() if tokenizer is None else tokenizer.eos_ids)}
    return Loaded(model, tokenizer, config.generation, tuple(sorted(i for i in ends if i < model.limits.vocab_size)))


def read_config(checkpoint: Checkpoint, path: Path) -> ModelConfig:
    """Return the config of an open checkpoint: GGUF metadata, or config.json beside the tensors."""
    if checkpoint.container == "gguf":
        return config_from_gguf(checkpoint.metadata, checkpoint.tensors, str(path))
    return load_config(path if path.is_dir() else path.parent)


def _model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    engine_config: EngineConfig,
    backend: Backend,
    progress: Progress | None,
    diagnosis: Diagnosis | None,
) -> TransformerModel:
    engine_config.validate()
    resolved = families.resolve(config.mapping, config.source)
    if resolved.unread:
        log.info("%s: keys that nothing reads: %s", config.source, ", ".join(resolved.unread))
    weights = load_weights(TensorIndex(checkpoint), resolved.weights, backend, source=config.source, progress=progress)
    for file in checkpoint.files:  # the last tensors' neighbours and the metadata need not be resident beside the caches
        file.release(0, file.size)
    return TransformerModel(resolved.spec, weights, engine_config, backend, diagnosis=diagnosis)


def _tokenizer(checkpoint: Checkpoint, path: Path) -> Tokenizer | None:
    from metrale.text.tokenizer import Tokenizer

    if checkpoint.container == "gguf" and "tokenizer.ggml.model" in checkpoint.metadata:
        return Tokenizer.from_gguf(checkpoint.metadata)
    folder = path if path.is_dir() else path.parent
    return Tokenizer.from_directory(folder) if (folder / "tokenizer.json").is_file() else None
