"""Processes that end with their parent, so that none writes into a stage that is running again."""

from __future__ import annotations

import os
import threading
import time


def end_with_parent(parent: int) -> None:
    """Start a thread that ends this process as soon as process `parent` is no longer its parent.

    A killed parent cannot notify its children; they would continue, hold locks and write.
    """
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)
    threading.Thread(target=watch, name="end with parent", daemon=True).start()
