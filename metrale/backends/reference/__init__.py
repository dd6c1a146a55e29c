"""The reference backend: every op in plain NumPy, slow and obvious. Other backends are tested against it."""

from metrale.backends.reference.backend import ReferenceBackend
from metrale.backends.reference.comm import ReferenceComm

__all__ = ["ReferenceBackend", "ReferenceComm"]
