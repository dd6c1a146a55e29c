"""`TensorIndex`: canonical names -> tensors of an open checkpoint, whatever its container and layout."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

from metrale.formats import Checkpoint, TensorView
from metrale.weights.gguf_names import gguf_name

# Where the decoder stands: plain causal models; multimodal ones on the hub, and as transformers 5 saves them; a saved
# base model. The first that has an embedding counts.
PREFIXES: Final = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
_HEAD: Final = "lm_head.weight"
_HEAD_NAMES: Final = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
)


class TensorIndex:
    """The tensors of a checkpoint under canonical names. It holds views, no data."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensors = checkpoint.tensors
        self.path = checkpoint.path
        self.gguf = checkpoint.container == "gguf"
        self.architecture = str(checkpoint.metadata.get("general.architecture", "")) if self.gguf else ""
        self.prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in self.tensors), PREFIXES[0])

    def stored_name(self, name: str) -> str:
        """Return the name that `name` has, or would have, in this checkpoint."""
        if self.gguf:
            return gguf_name(name, self.architecture) or name
        if name == _HEAD:
            return next((n for n in _HEAD_NAMES if n in self.tensors), name)
        return f"{self.prefix}{name}"

    def find(self, name: str) -> TensorView | None:
        """Return the tensor of a canonical name, or None."""
        return self.tensors.get(self.stored_name(name))

    def unused(self, used: Iterable[str], ignored: Iterable[str]) -> tuple[str, ...]:
        """Return the stored names that neither a used canonical name nor an ignored pattern covers."""
        known = {self.stored_name(name) for name in used}
        patterns = tuple(ignored)
        return tuple(name for name in self.tensors if name not in known and not any(fnmatchcase(name, p) for p in patterns))
