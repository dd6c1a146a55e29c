"""The error classes of metrale.

Every error carries a stable `code` (``weights.shape``), shared by Python, HTTP and C hosts, and a sentence of the form
*subject: expected, got; remedy*. The text stands where the error is raised; this file only names the classes.
"""

from __future__ import annotations


class MetraleError(Exception):
    """Base of everything metrale raises on purpose."""

    default_code = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code if code is not None else self.default_code


class ConfigError(MetraleError):
    """A configuration (model config, engine options, environment) is malformed or contradictory."""

    default_code = "config"


class RequestError(MetraleError, ValueError):
    """One request is invalid; the engine stays usable."""

    default_code = "request"


class WeightError(MetraleError):
    """A checkpoint's bytes are damaged, missing, or disagree with its config."""

    default_code = "weights"


class UnsupportedError(MetraleError):
    """Valid input that this build does not implement; the sentence names it."""

    default_code = "unsupported"


class CapacityError(MetraleError):
    """Memory, blocks, rows or slots do not suffice; the request may be retried later or made smaller."""

    default_code = "capacity"


class DeviceError(MetraleError):
    """A kernel, driver or compiler failed."""

    default_code = "device"


class CaptureError(DeviceError):
    """Something happened inside a capture that a replay could not repeat."""

    default_code = "capture"
