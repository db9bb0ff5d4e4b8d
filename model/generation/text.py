"""Streams text from tokens, and returns only text that cannot change any more."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of one sequence, up to the one of its stop strings that is complete first.

    The beginning of a possible stop string, and the first bytes of an incomplete character, are held back until they
    are certain.

    Args:
        stop: strings that end the text, wherever tokens begin and end.

    Attributes:
        stopped: whether a stop string was found.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, content: bytes) -> str:
        """Add UTF-8 bytes. Returns the text that is certain now: all the rest if they complete a stop string."""
        return self._certain(self._decoder.decode(content))

    def finish(self) -> str:
        """Returns the text that was held back, after the last bytes. Bytes of a broken character become U+FFFD."""
        text = self._certain(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _certain(self, new: str) -> str:
        if self.stopped:
            return ""
        self._held += new
        result = [(place + len(stop), place) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if result:
            self.stopped = True
            _, place = min(result)  # as if characters came one by one: token boundaries do not matter
            text, self._held = self._held[:place], ""
        else:
            open_end = max((_started_stop(self._held, stop) for stop in self._stop), default=0)
            keep = len(self._held) - open_end
            text, self._held = self._held[:keep], self._held[keep:]
        return text


def _started_stop(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop` at the end of `text`, which does not contain all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
