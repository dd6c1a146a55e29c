"""From tokens to the text a caller may see: detokenize, look for stop strings, hold back what is not certain."""

from __future__ import annotations

from metrale.text.detokenizer import Detokenizer
from metrale.text.stops import StopMatcher, StopStrings
from metrale.text.tokenizer import Tokenizer


class TextOutput:
    """The text of one choice; without a tokenizer it stays empty."""

    __slots__ = ("_detokenizer", "_matcher", "_pieces")

    def __init__(self, tokenizer: Tokenizer | None, stops: StopStrings | None) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._matcher = None if tokenizer is None or stops is None else StopMatcher(stops)
        self._pieces: list[str] = []

    @property
    def emitted(self) -> str:
        """Return everything that `push` and `finish` have returned."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take a token; return the text that may be shown now, and the stop string it completed, if any.

        may_stop: False for tokens before `min_tokens`, in which stop strings are not looked for.
        """
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.push(token_id)
        if may_stop:
            return self._match(text)
        if text:
            self._pieces.append(text)
        return text, None

    def finish(self) -> tuple[str, str | None]:
        """End the text; return what was held back, and a stop string that its last character completed, if any.

        After a stop string nothing more comes.
        """
        if self._detokenizer is None:
            return "", None
        if self._matcher is not None and self._matcher.hit is not None:
            return "", None
        text, stop = self._match(self._detokenizer.flush())
        if stop is None and self._matcher is not None:
            held = self._matcher.flush()
            text += held
            if held:
                self._pieces.append(held)
        return text, stop

    def _match(self, text: str) -> tuple[str, str | None]:
        stop = None
        if self._matcher is not None:
            text = self._matcher.push(text)
            stop = None if self._matcher.hit is None else self._matcher.hit.stop
        if text:
            self._pieces.append(text)
        return text, stop
