"""Measure llama.cpp on one GGUF: prefill and decode tokens/s and peak RSS.

Run: python -m bench.peers.llama_cpp_run MODEL THREADS N_PROMPT N_DECODE (OMP_WAIT_POLICY comes from the environment).
The low-level API is used so that Python adds a few microseconds a token at most.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np


def prompt_ids(count: int, vocab: int) -> list[int]:
    """Return the benchmark's prompt: fixed pseudo-random ids, the same for every engine."""
    rng = np.random.default_rng(1234)
    return [int(i) for i in rng.integers(100, vocab - 100, count)]


def rss_bytes() -> int:
    """Return the resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_rss_bytes() -> int:
    """Return the most bytes this process ever had resident (getrusage would count its parent's from before exec)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main(argv: list[str]) -> None:
    """Load, prefill, decode, print."""
    import llama_cpp

    path, threads, n_prompt, n_decode = argv[0], int(argv[1]), int(argv[2]), int(argv[3])
    before = rss_bytes()
    model = llama_cpp.Llama(
        path,
        n_ctx=n_prompt + n_decode + 16,
        n_batch=n_prompt,
        n_ubatch=n_prompt,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )
    ctx, vocab = model.ctx, model.n_vocab()
    ids = prompt_ids(n_prompt, vocab)

    def evaluate(tokens: list[int]) -> int:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        if llama_cpp.llama_decode(ctx, batch) != 0:
            raise SystemExit("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax())

    best_prefill = 0.0
    for _ in range(2):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
        start = time.perf_counter()
        token = evaluate(ids)
        best_prefill = max(best_prefill, n_prompt / (time.perf_counter() - start))
    start = time.perf_counter()
    for _ in range(n_decode):
        token = evaluate([token])
    decode = n_decode / (time.perf_counter() - start)
    info = llama_cpp.llama_print_system_info()
    print(
        json.dumps(
            {
                "prefill_tok_s": best_prefill,
                "decode_tok_s": decode,
                "rss_before": before,
                "rss_peak": peak_rss_bytes(),
                "version": llama_cpp.__version__,
                "info": ctypes.string_at(info).decode() if not isinstance(info, bytes) else info.decode(),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
