"""Parts of an evaluation that are measured once: each is kept under the identity of what decides it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from drover.pipeline.contract.tasks import Ledger
from drover.pipeline.core.files import sha256_json
from drover.pipeline.parallel.ranks import Ranks

LIBRARIES = ("torch", "lm_eval", "datasets")


class Kept:
    """Results in a folder, written as each is there: a kill, a task that fails or another list of tasks costs nothing
    of what was measured before.

    Args:
        folder: of the ledger.
        made_by: what, besides a part's own inputs, decides all of them, as JSON: the code that measures.
        ranks: all call `get` and `has` together.
        say: tells the user what was measured and what was kept; called on rank 0.

    Attributes:
        seconds: how long each part took when it was measured.
    """

    def __init__(self, folder: Path, made_by: Any, ranks: Ranks, say: Callable[[str], None]) -> None:
        self.ledger, self.ranks, self.say = Ledger(folder), ranks, say
        self.seconds: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self._made_by = [made_by, {package: metadata.version(package) for package in LIBRARIES}]

    def get(self, name: str, decides: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """The part `name`: from disk if it was measured of the same, else what `measure` returns, a JSON value.

        decides: all that the result depends on, as JSON, besides the code and the libraries that measure: another of
        those measures again, so that it is known what made each part.
        """
        record, said = self._look(name, decides), "measured before, kept"
        if record is None:
            began = time.monotonic()
            value = json.loads(json.dumps(measure()))  # the same whether it was on disk or not
            record = {"seconds": round(time.monotonic() - began, 3), "value": value}
            said = f"{record['seconds']:.1f} s"
            if self.ranks.leads:
                self.ledger.add(name, self._keys[name], record)
        self.seconds[name] = record["seconds"]
        if self.ranks.leads:
            self.say(f"{name}: {said}")
        return record["value"]

    def has(self, name: str, decides: dict[str, Any]) -> bool:
        """Whether `get` would take the part from disk. Every rank asks."""
        return self._look(name, decides) is not None

    def _look(self, name: str, decides: dict[str, Any]) -> Any:
        """A part's record, if it was measured of the same."""
        self._keys[name] = key = sha256_json([decides, self._made_by])
        return self.ranks.same(self.ledger.found({name: key}).get(name) if self.ranks.leads else None)

    def forget(self) -> None:
        """Let no part count that this attempt took or measured: its inputs were not what their digests say."""
        for name in self.seconds if self.ranks.leads else ():
            self.ledger.add(name, self._keys[name], None)
