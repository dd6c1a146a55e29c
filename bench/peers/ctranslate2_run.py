"""Measure CTranslate2 on the shape of a GGUF's model with random int8 weights: prefill and decode tokens/s.

Run: python -m bench.peers.ctranslate2_run MODEL THREADS N_PROMPT N_DECODE. The model is made once through transformers
and kept in the cache folder; speed does not depend on the values of the weights.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.peers.llama_cpp_run import prompt_ids
from metrale import paths


def converted(path: str) -> Path:
    """Return a CTranslate2 model of the same shape, made when it is not there."""
    target = paths.cache_dir() / "bench" / f"{Path(path).stem}-ct2-int8"
    if (target / "model.bin").exists():
        return target
    import torch
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from metrale.cli.inspect import inspect

    config = inspect(Path(path))["config"]
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{key: config[key] for key in keys}, tie_word_embeddings=True))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        vocab = {f"t{i}": i for i in range(config["vocab_size"])}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="t0")), unk_token="t0", bos_token="t1", eos_token="t2"
        )
        tokenizer.save_pretrained(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        TransformersConverter(folder).convert(str(target), quantization="int8", force=True)
    return target


def main(argv: list[str]) -> None:
    """Load, prefill, decode, print."""
    path, threads, n_prompt, n_decode = argv[0], int(argv[1]), int(argv[2]), int(argv[3])
    folder = converted(path)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import ctranslate2

    generator = ctranslate2.Generator(str(folder), compute_type="int8", intra_threads=threads, inter_threads=1)
    ids = prompt_ids(n_prompt, 49152)
    prompt = [f"t{i}" for i in ids]

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        generator.generate_batch(
            [prompt],
            max_length=new_tokens,
            min_length=new_tokens,
            include_prompt_in_result=False,
            sampling_topk=1,
            end_token=[],
        )
        return time.perf_counter() - start

    seconds(1)
    first = min(seconds(1) for _ in range(2))
    rest = min(seconds(n_decode + 1) for _ in range(2)) - first
    print(json.dumps({"prefill_tok_s": n_prompt / first, "decode_tok_s": n_decode / rest, "version": ctranslate2.__version__}))


if __name__ == "__main__":
    main(sys.argv[1:])
