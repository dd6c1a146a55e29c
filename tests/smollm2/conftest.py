"""The checkpoint, engines over it, the texts they make, and transformers beside them: each once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from metrale import LLM, hub
from tests.oracles import oracle_module
from tests.smollm2.prompts import PROMPTS

NAME = "smollm2-135m"
NEW_TOKENS = 64


class Text(NamedTuple):
    """A prompt's ids and the greedy answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The pulled checkpoint; a machine that has none fetches it."""
    return hub.pull(NAME)


@pytest.fixture(scope="session")
def exact(smollm2_path: Path) -> Iterator[LLM]:
    """The engine with float32 activations."""
    with LLM(smollm2_path, device="cpu", threads=2, activations="f32", max_context=1024, max_rows=20) as llm:
        yield llm


@pytest.fixture(scope="session")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    """The engine as users get it: int8 activations."""
    with LLM(smollm2_path, device="cpu", threads=2, max_context=1024) as llm:
        yield llm


@pytest.fixture(scope="session")
def texts(exact: LLM) -> tuple[Text, ...]:
    """Twenty prompts, each with 64 greedy tokens of the float32 engine."""
    ids = [exact.chat_ids([{"role": "user", "content": p.text}]) if p.chat else exact.tokenizer.encode(p.text) for p in PROMPTS]
    results = exact.generate(ids, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return tuple(Text(r.prompt_token_ids, r.token_ids) for r in results)


@pytest.fixture(scope="session")
def oracle_logits(smollm2_path: Path, texts: tuple[Text, ...]) -> tuple[np.ndarray, ...]:
    """transformers' float32 logits at every token of every text, (tokens, V) each."""
    torch = oracle_module("torch", why="the oracle needs torch and transformers")
    oracle_module("transformers", why="the oracle needs torch and transformers")
    oracle_module("gguf", why="the oracle's weights are read by the gguf package")
    from tests.smollm2.oracle import open_oracle

    model: Any = open_oracle(smollm2_path)
    found: dict[int, np.ndarray] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine its threads wait for one another far longer than one of them works
    try:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        for start in range(0, len(order), 5):
            batch = order[start : start + 5]
            width = len(texts[batch[-1]].tokens)
            # Padding stands at the right, where no token looks.
            ids = torch.tensor([(*texts[i].tokens, *([0] * (width - len(texts[i].tokens)))) for i in batch])
            with torch.inference_mode():
                logits = model(ids).logits.numpy()
            found.update({i: logits[row, : len(texts[i].tokens)].copy() for row, i in enumerate(batch)})
    finally:
        torch.set_num_threads(threads)
    return tuple(found[i] for i in range(len(texts)))
