"""Opening the CUDA backend where it cannot be: what is said, and that the CPU is taken instead."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from metrale.backends import select
from metrale.backends.cuda import probe
from metrale.backends.cuda.backend import CudaBackend
from metrale.config.engine import EngineConfig
from metrale.errors import ConfigError, UnsupportedError


def fake_cupy(**runtime: Any) -> Any:
    """Return a module that is cupy to those who ask for versions and devices."""
    return SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=SimpleNamespace(**runtime)))


def failing(message: str) -> Any:
    def call(*args: object) -> Any:
        raise RuntimeError(message)

    return call


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=r"metrale\[cuda13\]") as caught:
        select.open_backend(EngineConfig(device="cuda"))
    assert caught.value.code == "device.unavailable"
    found, remedy = probe.describe()
    assert "CuPy" in found
    assert remedy is not None
    assert "pip install" in remedy


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(getDeviceCount=failing("no device")))
    with pytest.raises(UnsupportedError, match="no device") as caught:
        CudaBackend()
    assert caught.value.code == "device.unavailable"
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(getDeviceCount=lambda: 1))
    with pytest.raises(UnsupportedError, match="number 3"):
        CudaBackend(ordinal=3)


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="f8"):
        CudaBackend(activation_dtype="f8")
    with pytest.raises(ConfigError, match="int4"):
        CudaBackend(activations="int4")
    with pytest.raises(UnsupportedError, match="one rank"):
        CudaBackend(comm=SimpleNamespace(size=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(("driver", "built", "remedy"), [(0, 13000, None), (12040, 13000, "cuda12"), (12090, 12090, "smi")])
def test_the_doctor_s_remedies(monkeypatch: pytest.MonkeyPatch, driver: int, built: int, remedy: str | None) -> None:
    cupy = fake_cupy(driverGetVersion=lambda: driver, runtimeGetVersion=lambda: built, getDeviceCount=failing("gone"))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(probe, "gpu_present", lambda: False)
    found, said = probe.describe()
    assert "CuPy 14.2.0" in found
    assert (said is None) == (remedy is None)
    assert remedy is None or remedy in (said or "")
    monkeypatch.setattr(probe, "gpu_present", lambda: True)
    assert probe.describe()[1]


def test_auto_stays_on_the_cpu_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(probe, "gpu_present", lambda: True)
    select._mention_gpu.cache_clear()
    with caplog.at_level(logging.INFO, "metrale"):
        for _ in range(2):
            backend = select.open_backend(EngineConfig(device="auto", threads=1))
            assert backend.name == "cpu"
            backend.close()
    assert [r.message for r in caplog.records if "GPU" in r.message] == [
        "device auto: a GPU is present, running on the CPU; device='cuda' takes the GPU"
    ]
    select._mention_gpu.cache_clear()
