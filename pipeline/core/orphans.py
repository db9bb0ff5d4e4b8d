"""Processes that end with the one that started them, so that nothing writes into a stage that is run again."""

from __future__ import annotations

import os
import threading
import time


def end_with_parent(parent: int) -> None:
    """Watch process `parent` from a thread, and end this process at once when it is no longer its parent.

    A killed parent cannot tell its children; they would go on, hold locks and write.
    """
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)
    threading.Thread(target=watch, name="end with parent", daemon=True).start()
