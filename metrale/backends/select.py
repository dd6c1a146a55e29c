"""Open the backend an engine's config asks for."""

from __future__ import annotations

from functools import cache

from metrale.backends.base import Backend
from metrale.config.engine import EngineConfig
from metrale.log import get_logger

log = get_logger(__name__)


def open_backend(config: EngineConfig) -> Backend:
    """Return a new backend; its owner closes it.

    "auto" stays on the CPU in this release: the CUDA kernels are right but not yet fast.
    Raises: UnsupportedError ``device.unavailable`` for a device this build or machine does not have.
    """
    if config.device == "reference":
        from metrale.backends.reference import ReferenceBackend

        return ReferenceBackend(activations=config.activations)
    if config.device == "cuda":
        from metrale.backends.cuda.backend import CudaBackend

        return CudaBackend(activations=config.activations)
    if config.device == "auto":
        _mention_gpu()
    from metrale.backends.cpu.backend import CpuBackend

    return CpuBackend(threads=config.threads or None, activations=config.activations)


@cache
def _mention_gpu() -> None:
    """Log once a process that a GPU is there and not taken."""
    from metrale.backends.cuda.probe import gpu_present

    if gpu_present():
        log.info("device auto: a GPU is present, running on the CPU; device='cuda' takes the GPU")
