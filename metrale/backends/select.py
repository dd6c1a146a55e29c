"""Open the backend an engine's config asks for."""

from __future__ import annotations

from metrale.backends.base import Backend
from metrale.config.engine import EngineConfig
from metrale.errors import UnsupportedError
from metrale.log import get_logger

log = get_logger(__name__)


def open_backend(config: EngineConfig) -> Backend:
    """Return a new backend; its owner closes it.

    Raises: UnsupportedError ``device.unavailable`` for a device this build or machine does not have.
    """
    if config.device == "reference":
        from metrale.backends.reference import ReferenceBackend

        return ReferenceBackend(activations=config.activations)
    if config.device == "cuda":
        # The CUDA backend runs the contract's tests; models are served on it from a later release on.
        raise UnsupportedError(
            "device: expected cpu, reference or auto in this release, got 'cuda'; use device='cpu'", code="device.unavailable"
        )
    from metrale.backends.cpu.backend import CpuBackend

    return CpuBackend(threads=config.threads or None, activations=config.activations)
