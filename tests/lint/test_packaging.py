"""What is built and installed: the metadata agrees with the tree, and an installed wheel answers."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools

import metrale
from metrale import hub

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "metrale"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

# Modules by the distribution that brings them, where the names differ.
DISTRIBUTIONS = {"cupy_backends": "cupy", "llama_cpp": "llama-cpp-python", "huggingface_hub": "huggingface-hub"}
# Wanted though nothing imports them: run as commands, or read as files.
COMMANDS = {"ruff", "mypy", "cython", "cython-lint"}
READ_AS_FILES = {"nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"}


def distribution(requirement: str) -> str:
    """Return the normalized name of a requirement; CuPy's builds by CUDA version count as one."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    normal = re.sub(r"[-_.]+", "-", name[0]).lower()
    return re.sub(r"^cupy-cuda\d+x$", "cupy", normal)


def imported(folder: str) -> set[str]:
    """Return the distributions that the Python and Cython files of a folder import."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    for path in (ROOT / folder).rglob("*.pyx"):
        for line in path.read_text().splitlines():
            match = re.match(r"\s*(?:import (\w+)|from (\w+)[\w.]* import )", line)
            found |= {name for name in match.groups() if name} if match else set()
    ours = {"metrale", "tests", "bench"}
    return {DISTRIBUTIONS.get(name, name) for name in found - ours - set(sys.stdlib_module_names)}


def extra(*names: str) -> set[str]:
    return {distribution(r) for name in names for r in PROJECT["optional-dependencies"][name]}


def source_files(folder: str) -> Iterator[str]:
    """Yield the paths below a folder, less what builds and runs leave there."""
    for path in sorted((ROOT / folder).rglob("*")):
        generated = path.suffix in {".so", ".pyc"} or (path.suffix == ".c" and path.parent.name == "_ext")
        if path.is_file() and not generated and "__pycache__" not in path.parts:
            yield path.relative_to(ROOT).as_posix()


def packages() -> set[str]:
    return set(setuptools.find_packages(str(ROOT), include=["metrale*"]))


def expected_in_wheel() -> set[str]:
    """Return the modules and the package data: what an installed metrale reads."""
    found = {
        path
        for path in source_files("metrale")
        if path.endswith(".py") and path.rsplit("/", 1)[0].replace("/", ".") in packages()
    }
    for package, patterns in PYPROJECT["tool"]["setuptools"]["package-data"].items():
        for pattern in patterns:
            matched = {p.relative_to(ROOT).as_posix() for p in (ROOT / package.replace(".", "/")).glob(pattern)}
            assert matched, f"package data {package}: {pattern} matches no file"
            found |= matched
    return found


def test_version_has_one_source() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "metrale.__version__"}
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading
    assert heading[1] == metrale.__version__


def test_oldest_python_is_the_same_everywhere() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    versions = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert versions[0] == oldest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    assert f"Python {versions[0]}-{versions[-1]}" in (ROOT / "Makefile").read_text()


def test_files_that_the_metadata_names_exist() -> None:
    for name in [PROJECT["readme"], *PROJECT["license-files"]]:
        assert (ROOT / name).is_file(), name
    module, function = PROJECT["scripts"]["metrale"].split(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_wheel_holds_what_runs_and_nothing_else() -> None:
    sources = {path for path in source_files("metrale") if path.endswith((".c", ".h", ".inc", ".pyx", ".pxd"))}
    assert set(source_files("metrale")) - expected_in_wheel() == sources


def test_sdist_holds_every_source() -> None:
    """MANIFEST.in lists files by folder and pattern; Python modules of packages come by themselves."""
    patterns: dict[str, list[str]] = {}
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        if line.startswith("recursive-include "):
            _, folder, *globs = line.split()
            patterns[folder] = globs
    assert set(patterns) == {"metrale", "tests", "bench"}
    for folder, globs in patterns.items():
        wanted = ["*.py", *globs] if folder == "metrale" else globs
        for path in source_files(folder):
            if not path.startswith("bench/results/"):
                assert any(fnmatch.fnmatch(path.rsplit("/", 1)[1], glob) for glob in wanted), f"MANIFEST.in misses {path}"


def test_dependencies_are_those_imported() -> None:
    core = {distribution(r) for r in PROJECT["dependencies"]}
    cuda = {"cupy"}
    assert imported("metrale") - cuda == core
    for name in ("cuda12", "cuda13"):
        assert extra(name) - READ_AS_FILES == cuda


def test_dev_and_peers_are_those_imported() -> None:
    core = {distribution(r) for r in PROJECT["dependencies"]}
    used = (imported("tests") | imported("bench")) - core - {"cupy"}
    assert used == extra("dev", "peers") - COMMANDS - READ_AS_FILES


def test_the_oracle_is_asked_for_only_where_it_can_be_had() -> None:
    for requirement in PROJECT["optional-dependencies"]["dev"]:
        if distribution(requirement) in {"torch", "transformers"}:
            assert requirement.endswith("python_version == '3.11'"), requirement


def test_extras_are_documented() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CHANGELOG.md").read_text()
    for name in PROJECT["optional-dependencies"]:
        assert re.search(rf"`{name}`|metrale\[{name}\]", text), f"the extra {name} is not documented"


# --- built and installed ----------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command outside the tree, without its path, and return its stdout."""
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"} and not k.startswith("METRALE_")}
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=clean | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist built from a copy of the tree, each in an isolated build."""
    folder = tmp_path_factory.mktemp("packaging")
    leave = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "results")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=leave)
    run(sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})", cwd=tree)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, *folder.glob("*.tar.gz"), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_contents_of_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    modules = {re.sub(r"\..*", "", name.rsplit("/", 1)[1]) for name in names if name.endswith(".so")}
    info = f"metrale-{metrale.__version__}.dist-info"
    assert modules == {path.stem for path in (PACKAGE / "_ext").glob("*.pyx")}
    assert {name for name in names if not name.endswith(".so") and not name.startswith(info)} == expected_in_wheel()
    assert f"{info}/licenses/LICENSE" in names
    assert wheel.stat().st_size < 5_000_000


@pytest.mark.slow
@pytest.mark.model
def test_an_installed_wheel_answers(wheel: Path, tmp_path: Path) -> None:
    """In a clean environment and another folder; running writes nothing beside the installed modules."""
    model = hub.pull("smollm2-135m")
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    bin_ = tmp_path / "env" / "bin"
    run(bin_ / "pip", "install", "-q", wheel, cwd=tmp_path)
    assert "No broken requirements" in run(bin_ / "pip", "check", cwd=tmp_path)
    (home,) = (tmp_path / "env").glob("lib/python3*/site-packages/metrale")
    before = {path for path in home.rglob("*") if "__pycache__" not in path.parts}
    assert run(bin_ / "metrale", "--version", cwd=tmp_path).strip() == f"metrale {metrale.__version__}"
    run(bin_ / "metrale", "doctor", cwd=tmp_path)
    command = (bin_ / "metrale", "generate", model, "The capital of France is", "--max-tokens", "8", "--temperature", "0")
    assert "Paris" in run(*command, cwd=tmp_path, METRALE_CACHE=str(tmp_path / "cache"))
    code = f"from metrale import LLM; print(LLM({str(model)!r}).generate('One, two, three,', max_tokens=4).text)"
    assert run(bin_ / "python", "-c", code, cwd=tmp_path).strip()
    assert {path for path in home.rglob("*") if "__pycache__" not in path.parts} == before
