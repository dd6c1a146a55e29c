"""What `metrale doctor` says of CUDA on this machine, and whether there is a GPU at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from metrale.backends.cuda.compiler import CupyNvrtc
from metrale.backends.cuda.driver import INSTALL, load_cupy
from metrale.backends.cuda.variants import architecture
from metrale.errors import MetraleError

_DEVICE_FILES: Final = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the last on WSL
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")


def gpu_present() -> bool:
    """Say whether the kernel shows an NVIDIA GPU; looks at device files alone."""
    return any(Path(file).exists() for file in _DEVICE_FILES)


def describe() -> tuple[str, str | None]:
    """Return (what was found, remedy or None): device, driver, CUDA, CuPy, NVRTC."""
    try:
        cupy = load_cupy()
    except MetraleError:
        return "CuPy does not load", INSTALL
    runtime = cupy.cuda.runtime
    found = [f"CuPy {cupy.__version__}"]
    try:
        driver, built = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    except RuntimeError as error:
        return f"{found[0]}, no driver ({error})", "install NVIDIA's driver, or use the CPU"
    found.append(f"driver {_driver_name()}CUDA {_dotted(driver)}" if driver else "no driver")
    found.append(f"CUDA runtime {_dotted(built)}")
    if not driver:
        return ", ".join(found), "install NVIDIA's driver, or use the CPU" if gpu_present() else None
    if driver // 1000 < built // 1000:
        wanted = driver // 1000
        return ", ".join(found), f"update the driver, or install metrale[cuda{wanted}] in place of this CuPy"
    return _device(cupy, found)


def _device(cupy: Any, found: list[str]) -> tuple[str, str | None]:
    """Add the device and the compiler."""
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        properties = runtime.getDeviceProperties(0) if count else None
    except RuntimeError as error:
        return f"{', '.join(found)}, no device ({error})", "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    if properties is None:
        return f"{', '.join(found)}, no device", "check CUDA_VISIBLE_DEVICES"
    arch = architecture((int(properties["major"]), int(properties["minor"])))
    found.insert(0, f"{properties['name'].decode()} ({arch}){f', first of {count}' if count > 1 else ''}")
    try:
        nvrtc = CupyNvrtc()
    except MetraleError as error:
        return f"{', '.join(found)}, no NVRTC ({error})", INSTALL
    found.append(f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}")
    if int(arch[3:].rstrip("a")) not in nvrtc.architectures():
        return ", ".join(found), f"install a newer {_compiler_wheel(nvrtc.version[0])}: this one cannot compile for {arch}"
    return ", ".join(found), None


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _compiler_wheel(major: int) -> str:
    return "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"


def _driver_name() -> str:
    """Return the driver's own version and a space, where the kernel tells it."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return f"{match[1]} " if match else ""

