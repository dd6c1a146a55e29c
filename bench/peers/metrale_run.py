"""Measure metrale as a user runs it, on one GGUF: prefill and decode tokens/s and peak RSS.

Run: python -m bench.peers.metrale_run MODEL THREADS N_PROMPT N_DECODE [REPEATS]. Prefill is prompt tokens over the time to
the first token; decode is tokens after the first over the time between them, sampling and text included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.peers.llama_cpp_run import peak_rss_bytes, prompt_ids, rss_bytes


def main(argv: list[str]) -> None:
    """Load, generate, print."""
    # The code that opening a model imports: what is measured is what the model itself brings.
    import tokenizers  # noqa: F401

    import metrale.backends.cpu.backend
    import metrale.backends.cpu.ops
    import metrale.engine.engine
    import metrale.model.load
    import metrale.text.gguf_vocab  # noqa: F401
    from metrale import LLM, SamplingParams, __version__
    from metrale.cli.inspect import inspect

    path, threads, n_prompt, n_decode = argv[0], int(argv[1]), int(argv[2]), int(argv[3])
    repeats = int(argv[4]) if len(argv) > 4 else 2
    ids = prompt_ids(n_prompt, 49152)
    before = rss_bytes()
    with LLM(path, device="cpu", threads=threads, max_context=n_prompt + n_decode + 16, max_rows=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=n_decode + 1, ignore_eos=True)
        llm.generate(ids[:8], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        runs = [llm.generate(ids, params).timings for _ in range(repeats)]
    peak = peak_rss_bytes()
    known = inspect(Path(path), context=n_prompt + n_decode + 1)
    print(
        json.dumps(
            {
                "prefill_tok_s": max(n_prompt / t.first_token_s for t in runs),
                "decode_tok_s": max(t.decode_tokens_per_s for t in runs),
                "rss_before": before,
                "rss_peak": peak,
                "file_bytes": Path(path).stat().st_size,
                "weight_bytes": known["weight_bytes"],
                "kv_bytes": known["memory"]["kv_bytes"],
                "version": __version__,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
