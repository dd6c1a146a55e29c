"""CuPy, imported when a device is wanted, and its errors in metrale's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from metrale.errors import DeviceError, UnsupportedError

INSTALL = "run `python -m pip install 'metrale[cuda13]'` (or metrale[cuda12] for a CUDA 12 driver)"


def load_cupy() -> Any:
    """Return the cupy module.

    Raises: UnsupportedError (``device.unavailable``) when it is not installed or does not load.
    """
    try:
        import cupy
    except (ImportError, OSError) as error:
        raise UnsupportedError(
            f"device: expected CuPy for 'cuda', got: {error}; {INSTALL}", code="device.unavailable"
        ) from error
    return cupy


def open_device(ordinal: int) -> Any:
    """Return cupy with a device current.

    Raises: UnsupportedError (``device.unavailable``) without a driver or a device of that number.
    """
    cupy = load_cupy()
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as error:
        raise UnsupportedError(
            f"device: expected a CUDA device, got: {error}; see `metrale doctor`, or use device='cpu'",
            code="device.unavailable",
        ) from error
    if ordinal >= count:
        raise UnsupportedError(
            f"device: expected one of {count} CUDA devices, got number {ordinal}; see CUDA_VISIBLE_DEVICES",
            code="device.unavailable",
        )
    runtime.setDevice(ordinal)
    return cupy


def device_error(what: str, error: Exception) -> DeviceError:
    """Return a failure of the driver or of a kernel as a DeviceError."""
    return DeviceError(
        f"{what}: expected the device to do it, got: {error}; after a fault inside a kernel the process must start again",
        code="device.fault",
    )


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Turn CuPy's errors (all RuntimeErrors) into DeviceError (``device.fault``)."""
    try:
        yield
    except RuntimeError as error:
        raise device_error(what, error) from error
