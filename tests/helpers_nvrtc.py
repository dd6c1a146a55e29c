"""NVRTC by ctypes, out of NVIDIA's wheels: compiles for any GPU on a machine that has none."""

from __future__ import annotations

import ctypes
import importlib.metadata
from pathlib import Path

from metrale.errors import DeviceError

# CUDA major version -> the wheel that carries its compiler
WHEELS = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}


def library(major: int) -> Path:
    """Return where a wheel put libnvrtc. Raises PackageNotFoundError where it is not installed."""
    wheel = importlib.metadata.distribution(WHEELS[major])
    wanted = f"libnvrtc.so.{major}"
    return next(Path(str(wheel.locate_file(file))) for file in wheel.files or () if file.name == wanted)


class Nvrtc:
    """One version of the compiler; meets `metrale.backends.cuda.compiler.Compiler`."""

    def __init__(self, major: int) -> None:
        self._lib = ctypes.CDLL(str(library(major)))
        found = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", *(ctypes.byref(n) for n in found))
        self.version = found[0].value, found[1].value

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            raise DeviceError(f"{name}: status {status}", code="device.nvrtc")

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def architectures(self) -> list[int]:
        """Return the compute capabilities it can compile for, as 10 * major + minor."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return list(found)

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> bytes:
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            failed = self._lib.nvrtcCompileProgram(program, len(options), flags)
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode()
            if failed or log:  # a warning is a failure here
                raise DeviceError(f"{name} with {' '.join(options)}: {log}", code="device.compile")
            return self._bytes("CUBIN", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))
