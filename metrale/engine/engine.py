"""The plain engine loop: plan, execute, deliver.

One step runs at most one prefill chunk and one decode batch, then hands each new token to its choice, which turns it into
text and decides whether it has ended. A failed part of a step ends only the requests it was for; blocks running out is
no failure: the youngest sequence goes back to the queue.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

from metrale.config.sampling import SamplingParams
from metrale.engine.interrupts import InterruptsDeferred
from metrale.engine.outputs import Delta, TokenLogprob
from metrale.engine.request import Choice, Request
from metrale.engine.scheduler import Scheduler
from metrale.engine.text_output import TextOutput
from metrale.errors import CapacityError, DeviceError, MetraleError, RequestError, UnsupportedError
from metrale.log import get_logger
from metrale.model.plan import StepFailure, StepResult, TokenResult
from metrale.model.protocols import Model
from metrale.model.sampler import row_sampling
from metrale.text.stops import StopStrings
from metrale.text.tokenizer import Tokenizer

log = get_logger(__name__)
_FAILURE_CLASSES: dict[str, type[MetraleError]] = {
    cls.__name__: cls for cls in (CapacityError, DeviceError, RequestError, UnsupportedError)
}


class Engine:
    """Runs many requests through one model, on the caller's thread."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None, eos_ids: Sequence[int], *, seed: int | None = None
    ) -> None:
        """Drive a model. seed: of requests that bring none (None: each draws its own)."""
        self._model = model
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._seed = seed
        self._scheduler = Scheduler(model, self._eos_ids)
        self._next_request = 0
        self._open: dict[int, Request] = {}
        self._stepping = False
        self._doomed: list[Request] = []  # cancelled while a step ran

    @property
    def has_work(self) -> bool:
        """Say whether `step` would do anything."""
        return self._scheduler.has_work

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what `submit` would raise.

        Raises: RequestError for an empty prompt (``prompt.empty``), a token out of range (``prompt.token``), a prompt that
        leaves no room in the context (``prompt.length``), parameters that contradict (``sampling.NAME``), stop strings
        without a tokenizer (``sampling.stop``); CapacityError ``capacity.blocks`` for a prompt the K/V pool can never hold.
        """
        self._check_prompt(tuple(prompt_ids), params)
        params.validate(vocab=self._model.limits.vocab_size, max_context=self._model.limits.context_tokens)
        # Bans of end ids under min_tokens share a table with the bias, whose room is checked here and not in mid-flight.
        row_sampling(params, prompt_len=len(prompt_ids), eos_ids=self._eos_ids, seed=0)
        StopStrings(params.stop)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt. Raises: as `check`."""
        ids = tuple(int(i) for i in prompt_ids)
        self.check(ids, params)
        drawn = self._seed if self._seed is not None else secrets.randbits(63)
        seed = params.seed if params.seed is not None else drawn
        self._next_request += 1
        request = Request(self._next_request, ids, params, seed)
        stops = StopStrings(params.stop) if params.stop else None
        request.choices = [Choice(request, i, TextOutput(self._tokenizer, stops)) for i in range(params.n)]
        self._open[request.request_id] = request
        self._scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Run one step and return the requests that gained something (see `Request.take_deltas`).

        A Ctrl-C meanwhile is raised when the step is complete.
        """
        with InterruptsDeferred():
            self._stepping = True
            try:
                return self._step()
            finally:
                self._stepping = False
                while self._doomed:
                    self.cancel(self._doomed.pop())

    def _step(self) -> list[Request]:
        plan = self._scheduler.plan()
        now = time.perf_counter()
        running = self._scheduler.by_seq()
        for spec in plan.admit:
            request = running[spec.seq_id].request
            request.started = request.started if request.started is not None else now
        try:
            result = self._model.execute(plan)
            self._scheduler.retired(plan.retire)
            for chunk in plan.chunks:
                if not any(chunk.seq_id in failure.seq_ids for failure in result.failures):
                    running[chunk.seq_id].prefilled = chunk.stop
            touched = self._deliver(result, running)
            self._handle_failures(result.failures, running, touched)
        except BaseException:
            # A second Ctrl-C, say: the model may be a token ahead of the choices; all start again from the tokens they have.
            self._scheduler.requeue_all()
            raise
        for request in touched.values():
            if request.finished:
                request.ended = time.perf_counter()
                self._open.pop(request.request_id, None)
        return list(touched.values())

    def cancel(self, request: Request) -> None:
        """End a request where it stands; its result says "cancelled". Harmless when it has ended.

        Within a step (the garbage collector may close an abandoned stream there) it takes effect when the step has ended.
        """
        if self._stepping:
            self._doomed.append(request)
            return
        for choice in request.choices:
            if not choice.finished:
                self._end(choice, "cancelled")
        request.ended = request.ended if request.ended is not None else time.perf_counter()
        self._open.pop(request.request_id, None)

    def cancel_all(self) -> None:
        """End every open request and free its sequences."""
        for request in list(self._open.values()):
            self.cancel(request)
        self.drain()

    def drain(self) -> None:
        """Free the sequences of ended requests without running others (used when no further step follows)."""
        if self._stepping:
            return
        with InterruptsDeferred():
            gone = self._scheduler.retiring
            for seq_id in gone:
                self._model.free_sequence(seq_id)
            self._scheduler.retired(gone)

    def run(self, requests: Sequence[Request], progress: Callable[[int, int], None] | None = None) -> None:
        """Step until the given requests are finished; an exception (Ctrl-C) cancels them first, then propagates."""
        try:
            while not all(request.finished for request in requests):
                self.step()
                if progress is not None:
                    progress(sum(r.prompt_done for r in requests), sum(len(r.prompt_ids) for r in requests))
        except BaseException:
            for request in requests:
                self.cancel(request)
            self.drain()
            raise
        self.drain()

    def _check_prompt(self, ids: tuple[int, ...], params: SamplingParams) -> None:
        limits = self._model.limits
        if not ids:
            raise RequestError("prompt: expected at least one token, got none; give some text", code="prompt.empty")
        bad = next((i for i in ids if not 0 <= i < limits.vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"prompt: expected token ids in [0, {limits.vocab_size}), got {bad}; use this model's tokenizer",
                code="prompt.token",
            )
        if len(ids) >= limits.context_tokens:
            raise RequestError(
                f"prompt: expected fewer than {limits.context_tokens} tokens (the context), got {len(ids)}; "
                "shorten it or open the model with a larger max_context",
                code="prompt.length",
            )
        need = self._model.blocks_for(len(ids) + 1)
        if need > limits.blocks:
            raise CapacityError(
                f"prompt: expected at most {limits.blocks} K/V blocks, got a prompt of {len(ids)} tokens that "
                f"needs {need}; open the model with a larger kv_memory_bytes or kv_blocks",
                code="capacity.blocks",
            )
        if self._tokenizer is None and params.stop:
            raise RequestError("stop: expected a model with a tokenizer, got none; use stop_token_ids", code="sampling.stop")

    # --- delivering tokens ---

    def _deliver(self, result: StepResult, running: dict[int, Choice]) -> dict[int, Request]:
        touched: dict[int, Request] = {}
        for entry in result.prompt_logprobs:
            request = running[entry.seq_id].request
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)  # nothing predicts the first token
            request.prompt_logprobs.append(TokenLogprob(entry.token, entry.logprob, entry.top))
        for token in result.tokens:
            choice = running[token.seq_id]
            if not token.finite:
                self._fail(choice.request, _not_finite(token))
                touched[choice.request.request_id] = choice.request
            if choice.finished:
                continue  # its request has just failed
            first = not choice.ready
            choice.prefilled, choice.ready = token.index, True
            if first and choice.index == 0 and not choice.output and len(choice.request.choices) > 1:
                self._fork(choice)
            self._accept(choice, token)
            touched[choice.request.request_id] = choice.request
        return touched

    def _fork(self, parent: Choice) -> None:
        plan = self._scheduler.fork_plan(parent)
        if plan is None:
            return
        forked = self._scheduler.by_seq()
        for failure in self._model.execute(plan).failures:
            # Not enough blocks to share now: the choice is prefilled on its own later.
            for seq_id in failure.seq_ids:
                if seq_id in forked and seq_id != parent.seq_id:
                    self._scheduler.requeue(forked[seq_id])

    def _accept(self, choice: Choice, token: TokenResult) -> None:
        request = choice.request
        params = request.params
        request.first_token = request.first_token if request.first_token is not None else time.perf_counter()
        if token.token in self._eos_ids and not params.ignore_eos:
            return self._end(choice, "stop")
        if token.token in params.stop_token_ids:
            return self._end(choice, "stop", token.token)
        choice.output.append(token.token)
        if token.logprob is not None:
            choice.logprobs.append(TokenLogprob(token.token, token.logprob, token.top))
        text, stop = choice.text.push(token.token, may_stop=len(choice.output) >= params.min_tokens)
        if stop is not None:
            return self._end(choice, "stop", stop, text)
        room = self._model.limits.context_tokens - len(request.prompt_ids) - len(choice.output)
        if room <= 0 or (params.max_tokens is not None and len(choice.output) >= params.max_tokens):
            return self._end(choice, "length", None, text)
        self._emit(choice, text)

    def _emit(self, choice: Choice, text: str) -> None:
        ids = tuple(choice.output[choice.emitted :])
        logprobs = tuple(choice.logprobs[choice.emitted :]) if choice.request.params.logprobs is not None else None
        choice.emitted = len(choice.output)
        choice.request.deltas.append(Delta(choice.index, text, ids, logprobs, choice.finish_reason))

    def _end(self, choice: Choice, reason: str, stop_reason: str | int | None = None, text: str = "") -> None:
        rest, stop = choice.text.finish()
        if stop is not None and reason != "cancelled":
            # The last character was incomplete until the text ended, and completed a stop string.
            reason, stop_reason = "stop", stop
        text += rest
        choice.finish_reason, choice.stop_reason = reason, stop_reason
        self._scheduler.release(choice)
        self._emit(choice, text)

    # --- failures ---

    def _handle_failures(
        self, failures: Sequence[StepFailure], running: dict[int, Choice], touched: dict[int, Request]
    ) -> None:
        for failure in failures:
            choices = [running[s] for s in failure.seq_ids if s in running and running[s].seq_id == s]
            if failure.code in ("capacity.blocks", "capacity.rows") and self._make_room(failure, choices):
                continue
            others = {s for f in failures if f is not failure for s in f.seq_ids}
            if failure.code == "sequence.state" and others & set(failure.seq_ids):
                continue  # a consequence of the failure before it
            for choice in choices:
                self._fail(choice.request, failure)
                touched[choice.request.request_id] = choice.request

    def _make_room(self, failure: StepFailure, choices: list[Choice]) -> bool:
        """Send a sequence back to the queue so that the others can go on; False when there is nobody to send."""
        if failure.part == "decode":
            return self._scheduler.num_running > 1 and self._scheduler.preempt() is not None
        if failure.part in ("chunk", "admit") and choices and self._scheduler.num_running > 1:
            self._scheduler.requeue(choices[0])
            return True
        return False

    def _fail(self, request: Request, failure: StepFailure) -> None:
        if request.error is None:
            request.error = _FAILURE_CLASSES.get(failure.error, MetraleError)(failure.message, code=failure.code)
        for choice in request.choices:
            if not choice.finished:
                self._scheduler.release(choice)
                choice.finish_reason = "cancelled"
        self._open.pop(request.request_id, None)


def _not_finite(token: TokenResult) -> StepFailure:
    """Return the failure of a sequence whose logits are NaN: its id 0 is no choice, and what follows would be noise."""
    message = (
        f"sequence {token.seq_id}: expected logits to choose token {token.index} from, got NaN; the weights may be damaged: "
        "run `metrale inspect --nan` on the checkpoint"
    )
    return StepFailure("decode", (token.seq_id,), "DeviceError", "device.not_finite", message)
