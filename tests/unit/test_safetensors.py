"""The safetensors reader on whole files: against the safetensors package, and its own rules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from metrale.errors import MetraleError, WeightError
from metrale.formats import open_checkpoint
from metrale.formats.safetensors import DTYPES, open_safetensors, open_sharded
from metrale.formats.types import FORMATS
from tests.helpers_safetensors import entry, pack_safetensors

NUMPY_DTYPES = ("float64 float32 float16 int64 uint64 int32 uint32 int16 uint16 int8 uint8 bool").split()  # noqa: SIM905


def some_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"t.{dtype}": rng.integers(0, 2, (i + 1, 3)).astype(dtype) for i, dtype in enumerate(NUMPY_DTYPES)}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = some_tensors() | {"scalar": np.array(3.5, np.float32), "none": np.zeros((0, 7), np.float16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np", "who": "wir"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.container == "safetensors"
        assert checkpoint.metadata == {"format": "np", "who": "wir"}
        assert set(checkpoint.tensors) == set(tensors)
        for name, want in tensors.items():
            view = checkpoint.tensors[name]
            got = view.data()
            assert (view.name, view.shape, view.nbytes, view.size) == (name, want.shape, want.nbytes, want.size)
            assert got.dtype == want.dtype
            assert got.flags.aligned
            np.testing.assert_array_equal(got, want)


def test_bf16_and_f8_come_as_bits(tmp_path: Path) -> None:
    header = {"a": entry("BF16", [2, 3], 0, 12), "b": entry("F8_E4M3", [3, 1], 12, 15), "c": entry("F4", [2, 4], 15, 19)}
    (tmp_path / "x.safetensors").write_bytes(pack_safetensors(header, bytes(range(19))))
    with open_safetensors(tmp_path / "x.safetensors") as checkpoint:
        a, b, c = (checkpoint.tensors[name] for name in "abc")
        assert (a.format, b.format, c.format) == ("bf16", "f8_e4m3", "f4")
        np.testing.assert_array_equal(a.data(), np.arange(12, dtype=np.uint8).view("<u2").reshape(2, 3))
        np.testing.assert_array_equal(b.data(), np.array([[12], [13], [14]], np.uint8))
        np.testing.assert_array_equal(c.data(), np.array([[15, 16], [17, 18]], np.uint8))  # rows of packed elements


def test_every_dtype_of_the_format_opens(tmp_path: Path) -> None:
    for dtype, name in DTYPES.items():
        form = FORMATS[name]
        nbytes = 3 * form.nbytes
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(pack_safetensors({"x": entry(dtype, [3, form.block], 0, nbytes)}, bytes(nbytes)))
        with open_safetensors(path) as checkpoint:
            assert checkpoint.tensors["x"].format == name
            assert not checkpoint.tensors["x"].data().any()
        with safe_open(path, "np") as theirs:
            assert list(theirs.keys()) == ["x"]


def test_a_misaligned_tensor_is_copied_to_an_aligned_one(tmp_path: Path) -> None:
    numbers = np.arange(5, dtype=np.float32)
    header = {"odd": entry("U8", [3], 0, 3), "x": entry("F32", [5], 3, 23)}
    text = json.dumps(header)
    text += " " * (-(8 + len(text)) % 8)
    (tmp_path / "x.safetensors").write_bytes(pack_safetensors(text, b"abc" + numbers.tobytes()))
    with open_safetensors(tmp_path / "x.safetensors") as checkpoint:
        got = checkpoint.tensors["x"].data()
        assert got.flags.aligned
        np.testing.assert_array_equal(got, numbers)


def test_arrays_outlive_close_and_new_ones_are_refused(tmp_path: Path) -> None:
    save_file({"x": np.arange(6, dtype=np.int32)}, tmp_path / "m.safetensors")
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    before = checkpoint.tensors["x"].data()
    checkpoint.close()
    checkpoint.close()
    assert before.tolist() == [0, 1, 2, 3, 4, 5]
    assert not before.flags.writeable
    checkpoint.tensors["x"].release()
    with pytest.raises(WeightError, match=r"m\.safetensors: expected an open checkpoint, got a closed one; read ") as caught:
        checkpoint.tensors["x"].data()
    assert caught.value.code == "weights.closed"


def resident_bytes(path: Path) -> int:
    """Return the bytes of a mapped file that are resident in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    total = 0
    for line in lines:
        if line.endswith(str(path)):
            total += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc/self/smaps")
def test_release_gives_pages_back_and_the_data_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    big = np.arange(1 << 20, dtype=np.float32)
    save_file({"big": big, "rows": np.ones((1024, 4096), np.float32)}, path)
    with open_checkpoint(path) as checkpoint:
        view = checkpoint.tensors["big"]
        data = view.data()
        assert data.sum(dtype=np.float64) == big.sum(dtype=np.float64)
        assert resident_bytes(path) >= big.nbytes
        view.release()
        assert resident_bytes(path) <= 64 << 10  # what the kernel maps around a fault at most
        np.testing.assert_array_equal(data, big)
        view.release()
        rows = checkpoint.tensors["rows"]
        data = rows.data()
        for start in range(0, 1024, 128):
            assert data[start : start + 128].sum() == 128 * 4096
            rows.release(start, start + 128)
            assert resident_bytes(path) <= 6 << 20  # the 2 MiB that a kernel may map around a fault, not the 16 of the tensor


# --- shards --------------------------------------------------------------------------------------------------------


def write_sharded(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    tensors = some_tensors(seed)
    names = list(tensors)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[number::3]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 77}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_a_sharded_folder_reads_like_one_file(tmp_path: Path) -> None:
    tensors = write_sharded(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        with open_checkpoint(path) as checkpoint:
            assert len(checkpoint.files) == 3
            assert checkpoint.metadata == {"total_size": 77}
            assert checkpoint.path == tmp_path / "model.safetensors.index.json"
            for name, want in tensors.items():
                np.testing.assert_array_equal(checkpoint.tensors[name].data(), want)


def test_the_index_decides_where_a_tensor_is_read(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3, np.float32), "y": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    save_file({"x": np.full(3, 7, np.float32)}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    with open_sharded(index) as checkpoint:
        assert checkpoint.tensors["x"].data().tolist() == [7, 7, 7]


def test_a_folder_prefers_model_safetensors_and_takes_a_lone_file(tmp_path: Path) -> None:
    save_file({"lone": np.zeros(3, np.float32)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["lone"]
    write_sharded(tmp_path)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.path.name == "model.safetensors.index.json"
    save_file({"single": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["single"]


def test_a_file_without_suffix_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "0a1b2c")
    with open_checkpoint(tmp_path / "0a1b2c") as checkpoint:
        assert checkpoint.container == "safetensors"


# --- the same verdict as the reference implementation ----------------------------------------------------------------

_ANY_INFO = st.builds(
    entry,
    st.sampled_from(["F32", "F16", "BF16", "I8", "BOOL", "F8_E5M2", "F4", "X9", 3]),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, -1, 1.0, True, 2**63]), max_size=2),
    st.sampled_from([0, 2, 4, 8, 12, -1]),
    st.sampled_from([0, 2, 4, 8, 12, 16, 2**64]),
)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict, int]:
    """Draw a header and its data's length: laid out properly, then perhaps spoilt."""
    header, reached = {}, 0
    for name in draw(st.permutations("dabc"))[: draw(st.integers(0, 4))]:
        dtype, size = draw(st.sampled_from([("F32", 4), ("F16", 2), ("U8", 1), ("F64", 8), ("F8_E4M3", 1)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        begin, reached = reached, reached + size * int(np.prod(shape))
        header[name] = entry(dtype, shape, begin, reached)
    if header and draw(st.booleans()):
        info = header[draw(st.sampled_from(sorted(header)))]
        info["data_offsets"][draw(st.integers(0, 1))] += draw(st.sampled_from([-1, 1, 2]))
    if header and draw(st.integers(0, 3)) == 0:
        header[draw(st.sampled_from(sorted(header)))] = draw(_ANY_INFO)
    return header, max(0, reached + draw(st.sampled_from([0, 0, 0, -1, 1])))


@settings(max_examples=300, deadline=None)
@given(drawn=headers())
def test_refuses_what_the_reference_implementation_refuses(tmp_path_factory: pytest.TempPathFactory, drawn) -> None:
    header, data_bytes = drawn
    path = tmp_path_factory.mktemp("s") / "x.safetensors"
    path.write_bytes(pack_safetensors(header, bytes(data_bytes)))
    try:
        with open_safetensors(path) as checkpoint:
            ours = {name: view.shape for name, view in checkpoint.tensors.items()}
    except MetraleError:
        ours = None
    try:
        with safe_open(path, "np") as theirs:
            reference = {name: tuple(theirs.get_slice(name).get_shape()) for name in theirs.keys()}  # noqa: SIM118
    except (SafetensorError, OverflowError):
        reference = None
    if ours is not None or not any(info["dtype"] == "F4" for info in header.values()):
        assert ours == reference  # F4 rows that end within a byte are refused here only
