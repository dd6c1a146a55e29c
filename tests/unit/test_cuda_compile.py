"""Every CUDA kernel variant compiles for every GPU we serve, on a machine that has none; and the cache of cubins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from metrale.backends.base import FIELD, ROW_FIELDS
from metrale.backends.cuda import compiler, variants
from metrale.backends.cuda.variants import ARCHITECTURES, VARIANTS, Variant, architecture, prelude, variants_of
from metrale.errors import DeviceError
from metrale.quant.blocks import BLOCKS
from tests.helpers_nvrtc import Nvrtc

CUDA = Path(compiler.__file__).parent
OPS = "\n".join(path.read_text() for path in CUDA.glob("ops*.py"))
# Each GPU once: older ones by the older compiler. CUDA 12.9 and 13 know all eight; before 12.8 there is no sm_100a or
# sm_120a, before 12.9 no sm_103a or sm_121a.
FAST = [(12, "sm_80"), (12, "sm_86"), (12, "sm_89"), (12, "sm_90a"), (13, "sm_100a"), (13, "sm_103a"), (13, "sm_120a"),
        (13, "sm_121a")]  # fmt: skip
SLOW = [(major, arch) for arch in ARCHITECTURES.values() for major in (12, 13) if (major, arch) not in FAST]


@cache
def nvrtc(major: int) -> Nvrtc:
    return Nvrtc(major)


def compile_all(major: int, arch: str) -> None:
    """Compile every variant; a warning fails, and so does an entry point that is not in the cubin."""
    compile_one = nvrtc(major).compile
    with ThreadPoolExecutor(2) as threads:
        cubins = threads.map(
            lambda v: compile_one(compiler.flatten(v), f"{v.file}{v.suffix}.cu", compiler.options(arch)), VARIANTS
        )
        for variant, cubin in zip(VARIANTS, cubins, strict=True):
            assert cubin.startswith(b"\x7fELF"), variant
            for name in compiler.entry_points(variant):
                assert f"\0.text.{name}{variant.suffix}\0".encode() in cubin, f"{name} of {variant}"


@pytest.mark.parametrize(("major", "arch"), FAST)
def test_every_variant_compiles(major: int, arch: str) -> None:
    compile_all(major, arch)


@pytest.mark.slow
@pytest.mark.parametrize(("major", "arch"), SLOW)
def test_every_variant_compiles_with_the_other_compiler(major: int, arch: str) -> None:
    compile_all(major, arch)


def test_every_gpu_is_compiled_for() -> None:
    assert {arch for _, arch in FAST} == set(ARCHITECTURES.values())
    assert {(m, a) for m, a in FAST + SLOW} == {(m, a) for m in (12, 13) for a in ARCHITECTURES.values()}
    for major in (12, 13):
        known = nvrtc(major).architectures()
        assert all(int(arch[3:].rstrip("a")) in known for arch in ARCHITECTURES.values()), known
    assert architecture((9, 0)) == "sm_90a"
    assert architecture((8, 7)) == "sm_87"


# --- the declared list ---------------------------------------------------------------------------------------------------


def test_every_kernel_file_is_declared() -> None:
    files = {path.stem for path in (CUDA / "kernels").glob("*.cu")}
    assert files == {variant.file for variant in VARIANTS}
    assert len(set(VARIANTS)) == len(VARIANTS)
    for dtype in variants.TYPES:
        assert {v.file for v in variants_of(dtype)} == files


def test_every_kernel_is_launched_and_every_launch_has_a_kernel() -> None:
    """Names in the ops are literals, or a literal and one of the endings of `_suffix`."""
    declared = {name for v in variants_of("f32") for name in compiler.entry_points(v)}
    used = set(re.findall(r'(?:_launch|_flat)\("(\w+)"', OPS))
    used |= {f"{op}{end}" for op in ("add", "scale", "softcap", "act_mul", "act_mul_q") for end in ("", "_f32")}
    used |= {f"{op}{end}" for op in ("linear", "linear_q") for end in ("", "_to_f32")}
    used |= {"gather_rows_2", "gather_rows_4"}
    assert declared == used


def test_entry_points_and_parameters() -> None:
    found = compiler.entry_points(Variant("norm", "f32"))
    assert set(found) == {"rms_norm", "rms_norm_q"}
    assert found["rms_norm"] == "pppiillllffi"
    for variant in VARIANTS:
        text = compiler.flatten(variant)
        assert text.count("KERNEL(") == len(compiler.entry_points(variant)) + 1, variant  # and the macro
        assert "#include" not in text


def test_the_prelude_states_the_contract() -> None:
    text = prelude(Variant("rows", ""))
    assert "using T" not in text
    for name, number in FIELD.items():
        assert f"constexpr int FIELD_{name.upper()} = {number};" in text
    assert f"NUM_FIELDS = {len(ROW_FIELDS)};" in text
    assert "using T = bf16;" in prelude(Variant("norm", "bf16"))
    assert set(variants.FORMATS) == {"f32", "f16", "bf16", *BLOCKS}


# --- the cache -----------------------------------------------------------------------------------------------------------


class Counting:
    """A compiler that counts its calls and puts out its input."""

    def __init__(self, version: tuple[int, int] = (13, 0)) -> None:
        self.version = version
        self.calls = 0

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> bytes:
        self.calls += 1
        return f"{options} {text}".encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("METRALE_CACHE", str(tmp_path / "cache"))
    compiler.source.cache_clear()
    yield tmp_path / "cache" / "cuda"
    compiler.source.cache_clear()


NORM = Variant("norm", "f32")


def test_a_cubin_is_compiled_once(folder: Path) -> None:
    nvrtc = Counting()
    first = compiler.cubin(NORM, "sm_90a", nvrtc)
    assert compiler.cubin(NORM, "sm_90a", nvrtc) == first
    assert nvrtc.calls == 1
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


def test_whatever_decides_the_cubin_changes_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = Counting()
    compiler.cubin(NORM, "sm_90a", nvrtc)
    compiler.cubin(NORM, "sm_80", nvrtc)
    compiler.cubin(Variant("norm", "f16"), "sm_90a", nvrtc)
    assert nvrtc.calls == 3
    newer = Counting((13, 1))
    compiler.cubin(NORM, "sm_90a", newer)
    assert newer.calls == 1
    plain = compiler.source
    header = "include/reduce.cuh"  # an edited header is another text
    monkeypatch.setattr(compiler, "source", lambda name: plain(name) + ("// edited\n" if name == header else ""))
    assert b"// edited" in compiler.cubin(NORM, "sm_90a", nvrtc)
    assert nvrtc.calls == 4
    monkeypatch.setattr(compiler, "source", plain)
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--use_fast_math"))
    compiler.cubin(NORM, "sm_90a", nvrtc)
    assert nvrtc.calls == 5


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_never_served(folder: Path, damage: bytes | None) -> None:
    nvrtc = Counting()
    whole = compiler.cubin(NORM, "sm_90a", nvrtc)
    (path,) = folder.iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] if damage is None else damage)
    assert compiler.cubin(NORM, "sm_90a", nvrtc) == whole
    assert nvrtc.calls == 2
    assert path.read_bytes() == raw


def test_a_cache_that_cannot_be_written_costs_only_time(folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    assert compiler.cubin(NORM, "sm_90a", Counting()).endswith(b"\n")


def test_a_failing_compiler_leaves_nothing(folder: Path) -> None:
    class Failing(Counting):
        def compile(self, text: str, name: str, options: tuple[str, ...]) -> bytes:
            raise DeviceError("no", code="device.compile")

    with pytest.raises(DeviceError):
        compiler.cubin(NORM, "sm_90a", Failing())
    assert not folder.exists()


def test_a_kernel_that_does_not_compile_shows_the_log() -> None:
    with pytest.raises(DeviceError, match="undefined_thing") as caught:
        nvrtc(13).compile("__global__ void f() { undefined_thing(); }", "bad.cu", compiler.options("sm_80"))
    assert caught.value.code == "device.compile"
