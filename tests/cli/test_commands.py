"""`inspect`, `doctor`, `pull`, help and usage."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from metrale.cli import inspect
from metrale.cli.main import LIBRARIES
from tests.cli.terminal import metrale
from tests.engine.tiny_checkpoint import tensors, write
from tests.hostile.refusal import LFS


@pytest.mark.model
def test_inspect_text_and_json(smollm2_path: Path) -> None:
    done = metrale("inspect", "smollm2-135m", "--context", "2048", "--tensors")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("gguf, 272 tensors", "q4_1 x210", "family: llama", "2048 tokens", "supported: yes", "blk.7.ffn_down.weight"):
        assert part in done.stdout
    report = json.loads(metrale("inspect", str(smollm2_path), "--json").stdout)
    assert report["container"] == "gguf"
    assert report["problems"] == report["warnings"] == []
    assert report["end_tokens"] == [2]
    memory = report["memory"]
    assert memory["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 4
    assert memory["total"] == memory["weights"] + memory["kv_bytes"]


def test_inspect_env() -> None:
    done = metrale("inspect", "env", env={"METRALE_THREADS": "3"})
    assert done.returncode == 0
    assert "METRALE_CACHE" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("METRALE_THREADS"))
    assert " 3 " in line


def test_inspect_warns_of_nan(tmp_path: Path) -> None:
    weights = tensors()
    weights["model.norm.weight"][:3] = np.nan
    folder = write(tmp_path / "nan", weights=weights)
    for options in ((), ("--nan",)):
        done = metrale("inspect", str(folder), *options)
        assert done.returncode == 0
        assert "warning: model.norm.weight: 3 of 32 values are NaN or infinite" in done.stdout
    assert "warning" not in metrale("inspect", str(folder), "--no-nan").stdout


def test_inspect_reads_weights_below_a_size(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[int] = []
    monkeypatch.setattr(inspect, "_scan", lambda checkpoint, report: scanned.append(report["weight_bytes"]))
    inspect.inspect(tiny, scan_nan=None)
    assert len(scanned) == 1
    monkeypatch.setattr(inspect, "SCAN_BYTES", scanned[0])
    inspect.inspect(tiny, scan_nan=None)
    assert len(scanned) == 1
    inspect.inspect(tiny, scan_nan=True)
    assert len(scanned) == 2


def test_inspect_tells_what_is_not_supported(tmp_path: Path, tiny: Path) -> None:
    for name, change, code in (
        ("arch", {"model_type": "nosuch"}, "config.architecture"),
        ("shape", {"intermediate_size": 47}, "weights.shape"),
        ("quant", {"quantization_config": {"quant_method": "awq"}}, "awq"),
    ):
        shutil.copytree(tiny, tmp_path / name)
        config = json.loads((tiny / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **change}))
        done = metrale("inspect", str(tmp_path / name))
        assert (done.returncode, done.stderr) == (1, "")
        problem = next(line for line in done.stdout.splitlines() if line.startswith("not supported: "))
        assert code in problem
        report = json.loads(metrale("inspect", str(tmp_path / name), "--json").stdout)
        assert len(report["problems"]) >= 1


@pytest.mark.parametrize(
    ("name", "content"),
    [("lfs.safetensors", LFS), ("short.gguf", b"GGUF\3\0"), ("empty.safetensors", b""), ("text.gguf", b"hello")],
)
def test_inspect_of_broken_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    done = metrale("inspect", str(tmp_path / name))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("metrale: ")
    assert ": expected " in done.stderr
    assert done.stderr.count("\n") == 1


def test_inspect_asks_the_safetensors_library_too(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors

    def refuse(*args: object, **options: object) -> None:
        raise safetensors.SafetensorError("no")

    assert inspect.inspect(tiny)["warnings"] == []
    monkeypatch.setattr(safetensors, "safe_open", refuse)
    (warning,) = inspect.inspect(tiny)["warnings"]
    assert "the safetensors library accepts, got: no" in warning


def test_inspect_refuses_a_negative_context(tiny: Path) -> None:
    done = metrale("inspect", str(tiny), "--context", "-5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--context" in done.stderr


@pytest.mark.parametrize("package", ["numpy", "tokenizers", "jinja2"])
def test_a_missing_library_is_one_sentence(tiny: Path, tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name={package!r})")
    done = metrale("generate", str(tiny), "abc", "--chat", "--max-tokens", "1", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"metrale: {package}: expected it to be importable, got: ")
    assert done.stderr.endswith(f"; run `python -m pip install {package}` [install.missing]\n")
    assert done.stderr.count("\n") == 1


def test_the_libraries_are_the_declared_ones() -> None:
    declared = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [line.partition(">=")[0] for line in declared] == list(LIBRARIES)


def test_doctor() -> None:
    done = metrale("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    for part in ("python", "numba", "kernels", "threads", "memory", "cache", "compiler", "cuda"):
        assert part in done.stdout


def test_doctor_reports_a_wrong_variable_beside_the_rest() -> None:
    done = metrale("doctor", env={"METRALE_TREADS": "2"})
    assert done.returncode == 0
    assert "METRALE_TREADS: expected a known METRALE_ variable" in done.stdout
    assert "memory" in done.stdout


def test_pull(tmp_path: Path) -> None:
    done = metrale("pull", "nosuch")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[model.not_found]" in done.stderr
    assert "smollm2-135m" in done.stderr


@pytest.mark.model
def test_pull_of_what_is_here_prints_its_path(smollm2_path: Path) -> None:
    done = metrale("pull", "smollm2-135m")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{smollm2_path}\n", "")


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "doctor", "pull"])
def test_help_has_examples(command: str) -> None:
    done = metrale(command, "--help")
    assert done.returncode == 0
    assert f"examples:\n  metrale {command}" in done.stdout


def test_usage() -> None:
    assert metrale("--help").returncode == 0
    assert metrale("--version").stdout.startswith("metrale ")
    for args in ((), ("nosuch",), ("generate",), ("generate", "m", "p", "--temperature", "warm")):
        done = metrale(*args)
        assert (done.returncode, done.stdout) == (2, "")
        assert "usage: metrale" in done.stderr
