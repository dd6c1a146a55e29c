"""Build the Cython extensions and the CPU kernels.

The C kernels of `metrale/backends/cpu/kernels` become part of `metrale._ext.cpu_kernels`. A file whose name ends in an
instruction set (`linear_avx2.c`) is compiled with that set's flags and only on its architecture; the choice between the
variants is made at run time, so a wheel runs on any machine of its architecture. `-ffp-contract=off` keeps the variants
bit-equal: only explicit fused multiply-adds fuse.

The files are compiled in parallel, one compiler a core: linear_*.c are most of the work and belong to one extension.
"""

import os
import platform
import shlex
import shutil
import sys
import sysconfig
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("metrale/backends/cpu/kernels")
COMMON_FLAGS = ["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden"]
# Python's own flags ask for debug information, which costs a third of the compile time and nine tenths of the size.
COMMON_FLAGS += ["-g0"]
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
    """Compile each kernel file with the flags of its instruction set, all files in parallel."""

    def build_extensions(self) -> None:
        """Replace the compiler's per-file step by one that queues it, and let its `compile` wait for the files it queued.

        Each extension has a thread, and each thread a queue; the pool bounds how many compilers run.
        """
        check_tools()
        self.parallel = max(len(self.extensions), 1)
        compile_files, compile_file = self.compiler.compile, self.compiler._compile
        queue = threading.local()

        def queue_file(obj, src, ext_name, cc_args, extra, pp_opts):
            isa = Path(src).stem.rsplit("_", 1)[-1]
            flags = ISA_FLAGS[isa][1] if isa in ISA_FLAGS and KERNELS.name in Path(src).parts else []
            queue.files.append(pool.submit(compile_file, obj, src, ext_name, cc_args, [*extra, *flags], pp_opts))

        def compile_and_wait(*args, **options):
            files: list[Future[None]] = []
            queue.files = files
            objects = compile_files(*args, **options)
            for file in files:
                file.result()  # a failed compilation raises here
            return objects

        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self.compiler.compile, self.compiler._compile = compile_and_wait, queue_file
        try:
            super().build_extensions()
        finally:
            self.compiler.compile, self.compiler._compile = compile_files, compile_file
            pool.shutdown(cancel_futures=True)


def check_tools() -> None:
    """End with one sentence where the C compiler or Python's headers are missing."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if shutil.which(shlex.split(compiler)[0]) is None:
        sys.exit(f"metrale needs a C compiler to build, got no {compiler!r}; install gcc or clang, or set CC to one")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        sys.exit(f"metrale needs Python's C headers to build, got no {header}; install them (Debian: python3-dev)")


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
