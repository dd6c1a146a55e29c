"""The one gate that decides, for every path, whether a step runs as a graph or eagerly.

Reasons against graphs are kept as a set, so that whoever adds one can take back only its own. A key whose capture failed
is declined on its own account after a few tries; the reason is logged once, or raised under METRALE_STRICT=1.
"""

from __future__ import annotations

from metrale import env
from metrale.errors import CaptureError, MetraleError
from metrale.log import get_logger
from metrale.model.graph_keys import GraphKey

log = get_logger(__name__)

MAX_TRIES = 3


class Gate:
    """Reasons to run eagerly: for all steps, and for single keys."""

    def __init__(self, *, graphs: bool) -> None:
        """Open the gate, or close it for good when the configuration asks for eager steps."""
        self._reasons: set[str] = set() if graphs else {"configured"}
        self._failures: dict[GraphKey, int] = {}
        self._logged: set[str] = set()

    def admits(self, key: GraphKey) -> bool:
        """Say whether a step with this key may be captured and replayed."""
        return not self._reasons and self._failures.get(key, 0) < MAX_TRIES

    def suppress(self, reason: str) -> None:
        """Add a reason to run eagerly."""
        self._reasons.add(reason)

    def allow(self, reason: str) -> None:
        """Take a reason back; the configured one stays."""
        if reason != "configured":
            self._reasons.discard(reason)

    def forget_failures(self) -> None:
        """Let failed keys be captured again (what they depended on has changed)."""
        self._failures.clear()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons in force."""
        return tuple(sorted(self._reasons))

    def capture_failed(self, key: GraphKey, error: MetraleError) -> None:
        """Note that a capture failed and the step is about to run eagerly; log the reason once a key and cause.

        Raises: CaptureError (``capture.declined``) under METRALE_STRICT=1.
        """
        self._failures[key] = self._failures.get(key, 0) + 1
        if env.get("METRALE_STRICT") == "1":
            raise CaptureError(
                f"graph {key}: expected the capture to succeed, got: {error}; unset METRALE_STRICT to run such steps eagerly",
                code="capture.declined",
            ) from error
        line = f"{key}: {error}"
        if line not in self._logged:
            self._logged.add(line)
            log.warning("graph %s: the capture failed, the step runs eagerly: %s", key, error)
