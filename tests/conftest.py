"""Options, and the `backend` fixture: one test over the reference, the CPU and (where there is one) the GPU."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from metrale.backends.base import Backend
from metrale.errors import MetraleError

# Tests are deterministic: the same examples in every run, and no time limit on a shared machine.
settings.register_profile(
    "metrale", deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("metrale")

BACKENDS = ("reference", "cpu", "cuda")
NO_CUDA = "no CUDA backend here"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
    parser.addoption("--gpu", action="store_true", help="a missing CUDA device is a failure, not a skip")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fold the skips for want of a GPU into one line of the summary: the same place and reason."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and NO_CUDA in report.longrepr[2]:
        report.longrepr = (__file__, open_cuda.__code__.co_firstlineno, report.longrepr[2])
    return report


@pytest.fixture(autouse=True)
def _gpu_marker(request: pytest.FixtureRequest) -> None:
    """Give tests marked `gpu` a device, a skip with the reason, or (with --gpu) a failure."""
    if request.node.get_closest_marker("gpu"):
        open_cuda(request.config).close()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each backend in turn, one instance for the whole run; float activations by default.

    A machine without a GPU skips "cuda" and says why; a CPU backend that cannot be opened is a failure.
    """
    opened = open_cuda(request.config) if request.param == "cuda" else open_backend(request.param)
    yield opened
    opened.close()


@pytest.fixture
def reference() -> Iterator[Backend]:
    """A reference backend of the test's own."""
    opened = open_backend("reference")
    yield opened
    opened.close()


def open_backend(kind: str) -> Backend:
    if kind == "reference":
        from metrale.backends.reference import ReferenceBackend

        return ReferenceBackend()
    from metrale.backends.cpu.backend import CpuBackend

    return CpuBackend(threads=2)


def open_cuda(config: pytest.Config) -> Backend:
    try:
        from metrale.backends.cuda.backend import CudaBackend

        return CudaBackend()
    except (ImportError, MetraleError) as error:
        reason = f"{NO_CUDA}: {error}"
    if config.getoption("--gpu"):
        pytest.fail(reason)
    pytest.skip(reason)
