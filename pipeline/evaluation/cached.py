"""Parts of an evaluation that are measured once: each is cached under a hash of its inputs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from drover.pipeline.contract.run import code_hashes
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.tasks import TASKS, Ledger
from drover.pipeline.core.files import Record, sha256_json
from drover.pipeline.evaluation.results import library_versions
from drover.pipeline.parallel.ranks import Ranks


class Cached:
    """Results of a stage, each written when it is measured. A kill, a failed task or another list of tasks loses no
    finished result. All ranks call the methods together.

    Attributes:
        seconds: the time that each part took when it was measured.
    """

    def __init__(self, work: Work, ranks: Ranks) -> None:
        self.ledger = Ledger(work.folder / TASKS / "measured")
        self.ranks = ranks
        self.say = work.say
        self.seconds: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self._made_by = [code_hashes(STAGES[work.name]), library_versions()]

    def get(self, name: str, identity: Record, measure: Callable[[], Any]) -> Any:
        """The part `name`: from disk if its inputs are equal, else the result of `measure`, a JSON value.

        identity: all inputs of the result, as JSON, besides the code and the libraries that measure. If those change,
        the part is measured again, so that the manifest names the code that made it.
        """
        record = self.ranks.by_leader(lambda: self.record(name, identity))
        how = "measured before, kept"
        if record is None:
            start = time.monotonic()
            value = json.loads(json.dumps(measure()))  # the same value whether cached or not
            record = {"seconds": round(time.monotonic() - start, 3), "value": value}
            how = f"{record['seconds']:.1f} s"
            if self.ranks.is_rank_zero:
                self.ledger.add(name, self._keys[name], record)
        self.seconds[name] = record["seconds"]
        if self.ranks.is_rank_zero:
            self.say(f"{name}: {how}")
        return record["value"]

    def record(self, name: str, identity: Record) -> Any:
        """What is on disk of a part, if its inputs are equal, else None. For rank 0."""
        self._keys[name] = key = sha256_json([identity, self._made_by])
        return self.ledger.recorded({name: key}).get(name)

    def forget(self) -> None:
        """Invalidate all parts of this start: its inputs did not match their digests."""
        for name in self.seconds if self.ranks.is_rank_zero else ():
            self.ledger.add(name, self._keys[name], None)
