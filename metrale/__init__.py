"""metrale: a torch-free inference engine for large language models.

    from metrale import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)

Importing this package loads nothing heavy: NumPy, Numba, CuPy and the tokenizer library come with the first engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metrale.api import LLM
    from metrale.config.sampling import SamplingParams
    from metrale.errors import MetraleError

__all__ = ["LLM", "MetraleError", "SamplingParams", "__version__"]

_HOMES = {"LLM": "metrale.api", "SamplingParams": "metrale.config.sampling", "MetraleError": "metrale.errors"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'metrale' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
