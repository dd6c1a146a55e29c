"""A mutation fuzzer for the checkpoint readers.

    python -m tests.hostile.fuzz_readers --seconds 600 --seed 1

Seeds are small valid files and everything in ``corpus/``. An input that takes a new way through the readers (a new
raising line, or a new set of formats when it opens) joins the pool. Any exception that is no MetraleError, a sentence
without its form, or an input that costs more than a second of CPU time is a failure: its bytes are written to ``--failures``.
``--keep`` writes the smallest input of every way to the corpus, named KIND-CODE-HASH.bin.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from metrale.errors import MetraleError
from metrale.formats import FORMATS, open_checkpoint
from metrale.formats.gguf_values import ArrayValue
from tests.helpers_gguf import info, pack_gguf, pair, text
from tests.helpers_safetensors import entry, pack_safetensors

CORPUS = Path(__file__).with_name("corpus")
FORM = re.compile(r"[^\n]+: expected [^\n]+, got [^\n]+; [^\n]+")
NAMES = {"safetensors": "m.safetensors", "gguf": "m.gguf", "index": "model.safetensors.index.json"}
MAX_BYTES = 20_000
SLOW_S = 1.0

Way = tuple[object, ...]


class Outcome(NamedTuple):
    """What became of an input: the way it took, its code ("ok" when it opened), and why it counts as a failure."""

    way: Way
    code: str
    failure: str = ""


class Box:
    """A folder in which one input after another takes the place of a checkpoint file."""

    def __init__(self, folder: Path) -> None:
        self.paths = {kind: folder / kind / name for kind, name in NAMES.items()}
        for path in self.paths.values():
            path.parent.mkdir()
        for name in ("one", "two"):
            shard = pack_safetensors({name: entry("U8", [3], 0, 3)}, b"abc")
            (folder / "index" / f"{name}.safetensors").write_bytes(shard)

    def run(self, kind: str, blob: bytes) -> Outcome:
        """Open the input and read everything it offers."""
        path = self.paths[kind]
        path.write_bytes(blob)
        begin = time.thread_time()
        try:
            outcome = Outcome(("ok", *read_everything(path)), "ok")
        except MetraleError as error:
            lines = [(Path(f.filename).name, f.lineno) for f in traceback.extract_tb(error.__traceback__)[-2:]]
            outcome = Outcome((error.code, *lines), error.code)
            if not FORM.fullmatch(str(error)):
                outcome = outcome._replace(failure=f"no sentence: {error}")
        except Exception:  # noqa: BLE001  finding these is the purpose
            outcome = Outcome(("crash",), "crash", traceback.format_exc())
        if (seconds := time.thread_time() - begin) > SLOW_S and not outcome.failure:
            outcome = outcome._replace(failure=f"took {seconds:.1f} s")
        return outcome


def read_everything(path: Path) -> list[str]:
    """Open a checkpoint, decode its metadata, read and release every tensor; return what kinds of things it held."""
    kinds = set()
    with open_checkpoint(path) as checkpoint:
        for view in checkpoint.tensors.values():
            array = view.data()
            packed = FORMATS[view.format].packed
            assert array.shape == ((view.rows, view.row_bytes) if packed else view.shape)
            assert array.nbytes == view.nbytes
            array.tobytes()
            view.release()
            kinds.add(f"{view.format}{len(view.shape)}")
    for value in checkpoint.metadata.values():
        if isinstance(value, ArrayValue):
            assert len(list(value)) == len(value)
            kinds.add(value.element)
            if value.element != "string":
                value.numpy()
        else:
            kinds.add(type(value).__name__)
    return sorted(kinds)


# --- seeds ---------------------------------------------------------------------------------------------------------


def seeds() -> Iterator[tuple[str, bytes]]:
    """Yield small valid inputs that use every part of the formats."""
    yield (
        "index",
        json.dumps(
            {"metadata": {"total_size": 6}, "weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
        ).encode(),
    )
    header = {
        "__metadata__": {"format": "pt"},
        "model.a": entry("F32", [2, 3], 0, 24),
        "é.b": entry("BF16", [4], 24, 32),
        "none": entry("F16", [0, 5], 32, 32),
        "s": entry("I64", [], 32, 40),
        "q": entry("F4", [1, 4], 40, 42),
        "t": entry("BOOL", [3], 42, 45),
    }
    yield "safetensors", pack_safetensors(header, bytes(range(45)))
    yield "safetensors", pack_safetensors({})
    scalars = "BbHhIif?__Qqd"
    pairs = [pair(f"k{kind}", kind, struct.pack("<" + code, 1)) for kind, code in enumerate(scalars) if code != "_"]
    pairs += [pair("s", 8, text("é")), pair("tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("Ġb"))]
    pairs += [
        pair(f"n{kind}", 9, struct.pack(f"<IQ2{code}", kind, 2, 0, 1)) for kind, code in enumerate(scalars) if code != "_"
    ]
    infos = [info("a", (3, 2), 0, 0), info("b", (32, 2), 2, 32), info("c", (256,), 14, 96), info("d", (2, 2, 2, 2), 30, 320)]
    yield "gguf", pack_gguf(pairs, infos, bytes(352))
    yield (
        "gguf",
        pack_gguf(
            [pair("general.alignment", 4, struct.pack("<I", 8))], [info("a", (2,), 24, 8)], bytes(16), version=2, alignment=8
        ),
    )
    yield "gguf", pack_gguf([pair("split.no", 2, b"\0\0"), pair("split.count", 2, b"\1\0")], [])
    for path in sorted(CORPUS.glob("*.bin")):
        yield path.name.partition("-")[0], path.read_bytes()


# --- mutations -----------------------------------------------------------------------------------------------------

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    12,
    13,
    31,
    32,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
WORDS = (
    b"GGUF", b"FUGG", b"{", b"}", b'"', b"[", b"]", b":", b",", b"null", b"true", b"NaN", b"-1", b"1e9", b"0.5", b"\\u",
    b"\\ud83d", b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"F32"', b'"F4"', b"[[", b"../", b"\xff", b"\0",
    b"\xc3", b"general.alignment", b"split.count", b"split.no", b"version https://git-lfs", b"one.safetensors",
    b"99999999999999999999",
)  # fmt: skip


def change_bits(rng: random.Random, blob: bytearray) -> None:
    for _ in range(rng.randint(1, 4)):
        blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)


def change_byte(rng: random.Random, blob: bytearray) -> None:
    blob[rng.randrange(len(blob))] = rng.choice((0, 1, 0x20, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def change_number(rng: random.Random, blob: bytearray) -> None:
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(len(blob))
    old = int.from_bytes(blob[at : at + size], "little")
    new = rng.choice((*NUMBERS, old + 1, old - 1, old * 2, old + 32, len(blob), len(blob) - at))
    blob[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")


def cut(rng: random.Random, blob: bytearray) -> None:
    del blob[rng.randrange(len(blob)) :]


def drop(rng: random.Random, blob: bytearray) -> None:
    at = rng.randrange(len(blob))
    del blob[at : at + rng.randint(1, 24)]


def double(rng: random.Random, blob: bytearray) -> None:
    at = rng.randrange(len(blob))
    piece = blob[at : at + rng.randint(1, 64)]
    to = rng.randrange(len(blob))
    blob[to:to] = piece * rng.choice((1, 1, 1, 2, 50))


def insert_word(rng: random.Random, blob: bytearray) -> None:
    at = rng.randrange(len(blob) + 1)
    word = rng.choice(WORDS)
    blob[at : at + rng.choice((0, len(word)))] = word


def insert_number_text(rng: random.Random, blob: bytearray) -> None:
    """Replace a decimal number of a JSON text by another one."""
    found = list(re.finditer(rb"\d+", bytes(blob[8:400])))
    if found:
        match = rng.choice(found)
        old = int(match[0][:30])
        new = rng.choice((*NUMBERS, -1, old + 1, old - 1, old * 2, 10**400, 0.5))
        blob[8 + match.start() : 8 + match.end()] = str(new).encode()


MUTATIONS: tuple[Callable[[random.Random, bytearray], None], ...] = (
    change_bits, change_byte, change_number, change_number, cut, drop, double, insert_word, insert_number_text,
)  # fmt: skip


def mutate(rng: random.Random, kind: str, blob: bytes, other: bytes) -> bytes:
    """Return a damaged copy; a safetensors header's length is mostly put right again, or nothing else is ever reached."""
    out = bytearray(blob)
    old_length = int.from_bytes(out[:8], "little")
    size = len(out)
    if rng.random() < 0.05 and other:
        at = rng.randrange(len(out) + 1)
        out[at:] = other[rng.randrange(len(other)) :]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if out:
            rng.choice(MUTATIONS)(rng, out)
    if kind == "safetensors" and rng.random() < 0.8 and len(out) >= 8 and old_length < size:
        grown = max(0, old_length + len(out) - size)
        out[:8] = struct.pack("<Q", rng.choice((old_length, grown, grown, grown)))
    return bytes(out[:MAX_BYTES])


# --- the loop ------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What a run found: inputs tried, the smallest input and code of every way, and failures with their inputs."""

    tried: int
    ways: dict[tuple[str, Way], tuple[bytes, str]]
    failures: list[tuple[str, bytes, str]]


def fuzz(
    seed: int,
    *,
    seconds: float = math.inf,
    inputs: float = math.inf,
    report: Callable[[str], object] = lambda line: None,
) -> Result:
    """Fuzz the readers for some seconds or inputs; the sequence of inputs depends on the seed and the corpus alone."""
    rng = random.Random(seed)
    ways: dict[tuple[str, Way], tuple[bytes, str]] = {}
    failures: list[tuple[str, bytes, str]] = []
    seen_failures: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        box = Box(Path(folder))
        pool: list[tuple[str, bytes]] = list(seeds())
        tried, next_report, end = 0, time.monotonic() + 10, time.monotonic() + seconds
        queue = list(pool)
        while time.monotonic() < end and tried < inputs:
            if queue:
                kind, blob = queue.pop()
            else:
                kind, parent = rng.choice(pool)
                blob = mutate(rng, kind, parent, rng.choice(pool)[1])
            outcome = box.run(kind, blob)
            tried += 1
            if outcome.failure and outcome.failure not in seen_failures:
                seen_failures.add(outcome.failure)
                failures.append((kind, blob, outcome.failure))
                report(f"FAILURE {kind}: {outcome.failure}")
            way = (kind, outcome.way)
            if way not in ways:
                pool.append((kind, blob))
            if way not in ways or len(blob) < len(ways[way][0]):
                ways[way] = (blob, outcome.code)
            if time.monotonic() > next_report:
                next_report += 10
                report(f"{tried} inputs, {len(ways)} ways, {len(failures)} failures")
    return Result(tried, ways, failures)


def keep(result: Result, folder: Path, most_bytes: int = 250_000) -> int:
    """Write the smallest input of every way that failed to open, and a few that opened; return how many are new."""
    folder.mkdir(exist_ok=True)
    total = sum(path.stat().st_size for path in folder.glob("*.bin"))
    present = {path.read_bytes() for path in folder.glob("*.bin")}
    written = 0
    per_code: dict[tuple[str, str], int] = {}
    for (kind, _), (blob, code) in sorted(result.ways.items(), key=lambda item: len(item[1][0])):
        per_code[kind, code] = per_code.get((kind, code), 0) + 1
        if blob in present or len(blob) > 4096 or total + len(blob) > most_bytes or per_code[kind, code] > 12:
            continue
        (folder / f"{kind}-{code}-{hashlib.sha256(blob).hexdigest()[:10]}.bin").write_bytes(blob)
        total += len(blob)
        written += 1
    return written


def main() -> int:
    """Run from the command line; the exit status says whether there were failures."""
    parser = argparse.ArgumentParser(description="fuzz the checkpoint readers")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="add new ways to tests/hostile/corpus")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    args = parser.parse_args()
    # A count that is believed shows as a MemoryError instead of a machine out of memory.
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    result = fuzz(args.seed, seconds=args.seconds, report=lambda line: sys.stderr.write(line + "\n"))
    for kind, blob, _ in result.failures:
        args.failures.mkdir(exist_ok=True)
        (args.failures / f"{kind}-crash-{hashlib.sha256(blob).hexdigest()[:10]}.bin").write_bytes(blob)
    new = keep(result, CORPUS) if args.keep else 0
    codes = sorted({f"{kind}:{code}" for (kind, _), (_, code) in result.ways.items()})
    sys.stdout.write(
        f"seed {args.seed}: {result.tried} inputs, {len(result.ways)} ways, {len(result.failures)} failures, {new} kept\n"
        f"codes: {' '.join(codes)}\n"
    )
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
