"""Tokens to text that is given out only when nothing of it can change any more."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of one sequence, up to the one of its stop strings that is complete first.

    What could become a stop string, and the first bytes of a character of which the others may still come, are held
    back until it is certain.

    Args:
        stop: strings that end the text, wherever tokens begin and end.

    Attributes:
        stopped: whether one of them came.
        given: characters that were given out.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped, self.given = False, 0
        self._stop = tuple(stop)
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, content: bytes) -> str:
        """What is certain now that these UTF-8 bytes came: the rest of the text if they completed a stop string."""
        return self._certain(self._decoder.decode(content))

    def finish(self) -> str:
        """What was held back, after the last bytes. Those of a broken character are U+FFFD."""
        text = self._certain(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        self.given += len(rest)
        return text + rest

    @property
    def length(self) -> int:
        """Whole characters so far, with those that are held back."""
        return self.given + len(self._held)

    def _certain(self, new: str) -> str:
        if self.stopped:
            return ""
        self._held += new
        found = [(place + len(stop), place) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, place = min(found)  # as if characters came one by one, so that it does not matter how tokens cut them
            text, self._held = self._held[:place], ""
        else:
            open_end = max((_begun(self._held, stop) for stop in self._stop), default=0)
            keep = len(self._held) - open_end
            text, self._held = self._held[:keep], self._held[keep:]
        self.given += len(text)
        return text


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the longest beginning of `stop`, which it does not contain."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
