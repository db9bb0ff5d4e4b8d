"""Parts of an evaluation that are measured once: each is cached under a hash of its inputs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drover.pipeline.contract.tasks import Ledger
from drover.pipeline.core.files import Record, sha256_json
from drover.pipeline.evaluation.results import library_versions
from drover.pipeline.parallel.ranks import Ranks


class Kept:
    """Cached results in a folder, each written when it is measured. A kill, a failed task or another list of tasks
    loses no finished result.

    Args:
        folder: of the ledger.
        made_by: common inputs of all parts, as JSON: the code that measures.
        ranks: all call `get` and `has` together.
        say: prints which parts were measured and which were cached; called on rank 0.

    Attributes:
        seconds: the time that each part took when it was measured.
    """

    def __init__(self, folder: Path, made_by: Any, ranks: Ranks, say: Callable[[str], None]) -> None:
        self.ledger, self.ranks, self.say = Ledger(folder), ranks, say
        self.seconds: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self._made_by = [made_by, library_versions()]

    def get(self, name: str, decides: Record, measure: Callable[[], Any]) -> Any:
        """The part `name`: from disk if its inputs are equal, else the result of `measure`, a JSON value.

        decides: all inputs of the result, as JSON, besides the code and the libraries that measure. If those change,
        the part is measured again, so that the manifest names the code that made it.
        """
        record, said = self._look(name, decides), "measured before, kept"
        if record is None:
            began = time.monotonic()
            value = json.loads(json.dumps(measure()))  # the same value whether cached or not
            record = {"seconds": round(time.monotonic() - began, 3), "value": value}
            said = f"{record['seconds']:.1f} s"
            if self.ranks.leads:
                self.ledger.add(name, self._keys[name], record)
        self.seconds[name] = record["seconds"]
        if self.ranks.leads:
            self.say(f"{name}: {said}")
        return record["value"]

    def has(self, name: str, decides: Record) -> bool:
        """Whether `get` would take the part from disk. Called on every rank."""
        return self._look(name, decides) is not None

    def _look(self, name: str, decides: Record) -> Any:
        """A part's record, if its inputs are equal."""
        self._keys[name] = key = sha256_json([decides, self._made_by])
        return self.ranks.same(self.ledger.found({name: key}).get(name) if self.ranks.leads else None)

    def forget(self) -> None:
        """Invalidate all parts of this start: its inputs did not match their digests."""
        for name in self.seconds if self.ranks.leads else ():
            self.ledger.add(name, self._keys[name], None)
