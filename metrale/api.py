"""`LLM`: open a checkpoint and get text from it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from metrale import env, hub
from metrale.config.engine import EngineConfig
from metrale.config.sampling import SamplingParams
from metrale.engine.outputs import Completion, Delta, Result, Timings, TokenLogprob, Usage
from metrale.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from metrale.engine.engine import Engine
    from metrale.engine.request import Request
    from metrale.model.protocols import Model
    from metrale.text.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Delta", "Result", "SamplingParams", "Timings", "TokenLogprob", "Usage"]

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Progress = Callable[[int, int], None]


class LLM:
    """A checkpoint, opened: text or token ids in, text, ids and log-probabilities out.

    Calls from several threads wait for one another. `close` (or leaving a ``with`` block) releases everything.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """Open a model: a path, or the name of one that `metrale pull` fetched.

        options: fields of `EngineConfig` (device, threads, activations, max_context, ...), over those of `config`.
        progress: called with (bytes done, bytes in all) while weights load.

        Raises: ConfigError, WeightError, UnsupportedError for a checkpoint that cannot be run; CapacityError when memory
        does not suffice.
        """
        env.check()
        self._config = _engine_config(config, options)
        self._path = hub.resolve(_name(model))
        self._lock = threading.RLock()
        self._closed = False
        self._open(progress)

    def _open(self, progress: Progress | None) -> None:
        from metrale.backends.select import open_backend
        from metrale.engine.engine import Engine
        from metrale.model.load import load_checkpoint

        self._backend = open_backend(self._config)
        try:
            loaded = load_checkpoint(self._path, self._config, self._backend, progress)
        except BaseException:
            self._backend.close()
            raise
        self._model: Model = loaded.model
        self._tokenizer: Tokenizer | None = loaded.tokenizer
        self._defaults = loaded.defaults
        self._engine: Engine = Engine(self._model, self._tokenizer, loaded.eos_ids, seed=self._config.seed)

    # --- what is open ---

    @property
    def path(self) -> Path:
        """Return where the checkpoint lies."""
        return self._path

    @property
    def config(self) -> EngineConfig:
        """Return the engine's options."""
        return self._config

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises: RequestError ``tokenizer.missing`` for a checkpoint without one."""
        if self._tokenizer is None:
            raise RequestError(
                f"{self._path}: expected a tokenizer beside the weights, got none; pass token ids, or add tokenizer.json",
                code="tokenizer.missing",
            )
        return self._tokenizer

    @property
    def model(self) -> Model:
        """Return the model the engine drives: for tests, evaluation and diagnosis."""
        return self._model

    def default_params(self, **given: Any) -> SamplingParams:
        """Return the checkpoint's own sampling defaults, overridden by what is given."""
        return SamplingParams.from_generation(self._defaults, **given)

    # --- generating ---

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | None = None, *, progress: Progress | None = None, **overrides: Any
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Sequence[int],
        params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> list[Result]: ...

    def generate(self, prompts: Any, params: Any = None, *, progress: Progress | None = None, **overrides: Any) -> Any:
        """Continue one prompt or many; each a string or a list of token ids.

        params: one for all, or one a prompt; None: the checkpoint's defaults. overrides: fields of SamplingParams.
        progress: called with (prompt tokens done, prompt tokens in all).
        Returns a Result for one prompt, a list in the same order for many.

        Raises: RequestError for bad input: no prompt is started then. A request that fails while running raises its own
        error after the others have ended.
        """
        single = _is_single(prompts)
        items: list[Any] = [prompts] if single else list(prompts)
        with self._lock:
            each = self._params_for(items, params, overrides)
            prepared = [(self._prompt_ids(item), p) for item, p in zip(items, each, strict=True)]
            requests = self._submit(prepared)
            self._engine.run(requests, progress)
        results = [request.result() for request in requests]
        return results[0] if single else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, progress: Progress | None = None, **overrides: Any
    ) -> Iterator[Delta]:
        """Yield pieces of the answer as they come; the last carries the whole `result`.

        progress: called with (prompt tokens done, prompt tokens in all) until the first piece.
        The request starts with the first piece asked for. Leaving the loop early, or an exception in it, ends the request
        and frees what it held.

        Raises: as `generate`; for bad input at the call, before the first piece.
        """
        if not _is_single(prompt):
            raise RequestError(
                f"prompt: expected one prompt to stream, got a list of {len(prompt)}; stream them one by one, or use generate",
                code="prompt.type",
            )
        with self._lock:
            (chosen,) = self._params_for([prompt], params, overrides)
            ids = self._prompt_ids(prompt)
            self._engine.check(ids, chosen)
        return self._pieces(ids, chosen, progress)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> Any:
        """Answer a conversation: messages with "role" and "content", through the checkpoint's own chat template.

        progress: as in `generate`. Returns a Result, or with stream=True an iterator of Delta.

        Raises: RequestError ``chat.messages`` for malformed messages, ``chat.template`` when the checkpoint has no template
        or refuses them.
        """
        ids = self.chat_ids(messages, tools=tools)
        if stream:
            return self.stream(ids, params, progress=progress, **overrides)
        return self.generate(ids, params, progress=progress, **overrides)

    def chat_ids(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Return the token ids of a conversation, the opening of the assistant's answer included."""
        return self.tokenizer.encode_chat(messages, tools=tools)

    # --- closing ---

    def close(self) -> None:
        """Release the model and its device; harmless twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._engine.cancel_all()
                self._model.close()
                self._backend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- helpers ---

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("LLM: expected an open model, got a closed one; open it again", code="engine.closed")

    def _params_for(self, items: Sequence[Prompt], params: Any, overrides: Mapping[str, Any]) -> list[SamplingParams]:
        self._check_open()
        unknown = sorted(set(overrides) - {f.name for f in fields(SamplingParams)})
        if unknown:
            raise RequestError(
                f"sampling: expected fields of SamplingParams, got {', '.join(unknown)}; check the spelling",
                code="sampling.unknown",
            )
        if params is None:
            return [self.default_params(**overrides)] * len(items)
        if isinstance(params, SamplingParams):
            return [replace(params, **overrides)] * len(items)
        each = list(params) if isinstance(params, list | tuple) else None
        if each is None or len(each) != len(items) or not all(isinstance(p, SamplingParams) for p in each):
            got = type(params).__name__ if each is None else f"{len(each)} values"
            raise RequestError(
                f"params: expected one SamplingParams, or one for each of {len(items)} prompts, "
                f"got {got}; pass as many as prompts",
                code="sampling.count",
            )
        return [replace(p, **overrides) for p in each]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            raise RequestError(
                f"prompt: expected a string or a list of token ids, got {type(prompt).__name__}; convert it first",
                code="prompt.type",
            )
        wrong = next((i for i in prompt if not isinstance(i, Integral) or isinstance(i, bool)), None)
        if wrong is not None:
            raise RequestError(
                f"prompt: expected a string or a list of token ids, got a list with {wrong!r:.40} in it; convert it first",
                code="prompt.type",
            )
        return [int(i) for i in prompt]

    def _submit(self, prepared: Sequence[tuple[list[int], SamplingParams]]) -> list[Request]:
        requests: list[Request] = []
        try:
            for ids, params in prepared:
                requests.append(self._engine.submit(ids, params))
        except BaseException:
            for request in requests:
                self._engine.cancel(request)
            raise
        return requests

    def _pieces(self, ids: Sequence[int], params: SamplingParams, progress: Progress | None) -> Iterator[Delta]:
        with self._lock:
            self._check_open()
            (request,) = self._submit([(list(ids), params)])
        waiting = progress
        try:
            while True:
                with self._lock:
                    # A step for another stream may have brought pieces of this one already.
                    deltas = list(request.take_deltas())
                    if not deltas and not request.finished:
                        self._engine.step()
                        deltas = list(request.take_deltas())
                    finished = request.finished
                if waiting is not None:
                    waiting(request.prompt_done, len(ids))
                    waiting = None if deltas else waiting
                if finished:
                    result = request.result()
                    if deltas:
                        deltas[-1] = replace(deltas[-1], result=result)
                    yield from deltas
                    return
                yield from deltas
        finally:
            with self._lock:
                if not self._closed:
                    self._engine.cancel(request)
                    self._engine.drain()


def _name(model: Any) -> str:
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    if not isinstance(name, str):
        raise ConfigError(
            f"model: expected a path or a name, got {type(model).__name__}; pass where the checkpoint lies",
            code="model.not_found",
        )
    return name


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise RequestError(
            f"prompt: expected a string, token ids, or a list of them, got {type(prompts).__name__}; convert it first",
            code="prompt.type",
        )
    # An empty list is an empty prompt, which submit refuses; a list of prompts is never empty.
    return not prompts or isinstance(prompts[0], Integral)


def _engine_config(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    unknown = sorted(set(options) - {f.name for f in fields(EngineConfig)})
    if unknown:
        raise ConfigError(
            f"LLM: expected options of EngineConfig, got {', '.join(unknown)}; check the spelling", code="engine.unknown"
        )
    return replace(config or EngineConfig(), **options).validate()
