"""Text leaves in order, one piece per token, and nothing of a stop string or behind it ever leaves."""

from __future__ import annotations

from collections import deque
from typing import Any


class StopFilter:
    """Cuts a text at the first stop string; text that might be the beginning of one is held back until it is not."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown now; after a stop string, nothing."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        ends = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.stopped = True
            shown, self._held = self._held[: min(ends)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The output ended otherwise: what was held back is text after all."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """Tokens to text pieces through mlx-lm's detokenizer, one piece per token, stop strings cut."""

    def __init__(self, detokenizer: Any, stops: tuple[str, ...] = ()):
        self._detokenizer = detokenizer
        self._filter = StopFilter(stops)
        self._pieces: deque[str] = deque()

    def push(self, token: int) -> bool:
        """Take a token in; true when it completes a stop string."""
        self._detokenizer.add_token(token)
        self._pieces.append(self._filter.push(self._detokenizer.last_segment))
        return self._filter.stopped

    def take(self) -> str:
        """The piece of the oldest token not taken yet; "" when there is none."""
        return self._pieces.popleft() if self._pieces else ""

    def finish(self) -> str:
        """What is left when the output ends; may hold a stop string's cut as well."""
        self._detokenizer.finalize()
        return self._filter.push(self._detokenizer.last_segment) + self._filter.flush()


def chat_prompt(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a user's text in the chat template, or of the bare text where the tokenizer has none."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
