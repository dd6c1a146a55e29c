"""Write goldens.json: the ids llama.cpp gives the corpus, by SmolLM2's vocabulary and by a small one for each pre-tokenizer.

Run it when the corpus changes, with llama-cpp-python and gguf installed and SmolLM2 pulled:

    python -m tests.text.make_goldens

`--merges` also trains small_bpe.json again first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from metrale import hub
from tests.text.corpus import HERE, corpus
from tests.text.vocabularies import PRE_NAMES, comparable, llama_cpp_of, small_bpe, train_merges, write_gguf


def main() -> None:
    if "--merges" in sys.argv:
        (HERE / "small_bpe.json").write_text(_compact(train_merges(1200)), encoding="utf-8")
    texts = corpus()
    model = hub.resolve("smollm2-135m")
    with llama_cpp_of(model) as judge:
        special = [judge.encode(text, special=True) for text in texts]
        plain = [judge.encode(text, special=False) for text in texts]
    goldens: dict[str, object] = {
        "smollm2": special,
        # Only where it differs: the texts that spell special tokens out.
        "smollm2_plain": {str(i): ids for i, ids in enumerate(plain) if ids != special[i]},
    }
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE_NAMES:
            path = write_gguf(Path(folder) / f"{pre}.gguf", small_bpe(pre))
            with llama_cpp_of(path) as judge:
                goldens[f"pre:{pre}"] = [judge.encode(text, special=True) if comparable(pre, text) else None for text in texts]
    lines = ",\n".join(f"{json.dumps(name)}: {_compact(value)}" for name, value in goldens.items())
    (HERE / "goldens.json").write_text("{" + lines + "}\n", encoding="utf-8")


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main()
