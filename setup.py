"""Build the Cython extensions and the CPU kernels.

The C kernels of `metrale/backends/cpu/kernels` become part of `metrale._ext.cpu_kernels`. A file whose name ends in an
instruction set (`linear_avx2.c`) is compiled with that set's flags and only on its architecture; the choice between the
variants is made at run time, so a wheel runs on any machine of its architecture. `-ffp-contract=off` keeps the variants
bit-equal: only explicit fused multiply-adds fuse.
"""

import platform
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("metrale/backends/cpu/kernels")
COMMON_FLAGS = ["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden"]
# Instruction set (suffix of the file name) -> architectures, flags.
ISA_FLAGS = {
    "avx2": (("x86_64",), ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]),
    "avxvnni": (("x86_64",), ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mavxvnni"]),
    "avx512vnni": (
        ("x86_64",),
        ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"],
    ),
    "neon": (("aarch64",), ["-march=armv8.2-a+dotprod+fp16"]),
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
ISA_FLAGS["generic"] = ((MACHINE,), ["-O2"])  # plain loops: -O3 makes them five times as large


def kernel_sources() -> list[str]:
    """List the kernel files that this architecture compiles."""
    found = []
    for path in sorted(KERNELS.glob("*.c")):
        isa = path.stem.rsplit("_", 1)[-1]
        if isa not in ISA_FLAGS or MACHINE in ISA_FLAGS[isa][0]:
            found.append(str(path))
    return found


class BuildExt(build_ext):
    """Compile each kernel file with the flags of its instruction set."""

    def build_extensions(self) -> None:
        """Wrap the compiler's per-file step to add flags by file name; once, since extensions may be built in parallel."""
        plain = self.compiler._compile

        def compile_one(obj, src, ext_name, cc_args, extra, pp_opts):
            isa = Path(src).stem.rsplit("_", 1)[-1]
            flags = ISA_FLAGS[isa][1] if isa in ISA_FLAGS and KERNELS.name in Path(src).parts else []
            plain(obj, src, ext_name, cc_args, [*extra, *flags], pp_opts)

        self.compiler._compile = compile_one
        try:
            super().build_extensions()
        finally:
            self.compiler._compile = plain


def extensions() -> list[Extension]:
    """Describe every extension module under metrale/_ext."""
    found = []
    for path in sorted(Path("metrale/_ext").glob("*.pyx")):
        name = f"metrale._ext.{path.stem}"
        sources, depends = [str(path)], []
        if path.stem == "cpu_kernels":
            sources += kernel_sources()
            depends = [str(p) for p in [*KERNELS.glob("*.h"), *KERNELS.glob("*.inc")]]
        found.append(
            Extension(name, sources, depends=depends, include_dirs=[str(KERNELS)], extra_compile_args=COMMON_FLAGS,
                      libraries=["m", "pthread"])
        )
    return found


DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "embedsignature": True,
}

setup(ext_modules=cythonize(extensions(), compiler_directives=DIRECTIVES, build_dir="build"), cmdclass={"build_ext": BuildExt})
