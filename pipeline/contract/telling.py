"""What the other ranks of a stage need to know of its run: rank 0 reads it for all, and tells them over the network.

Configuration, state and manifests are files of the run folder. Thousands of ranks that read them at one moment are a
load that file systems break under, and may see different states of them. So the others open none of them: they wait,
in the store in which torch's process groups meet, for what rank 0 made of them, or for word that nothing is to be done.
What is heard there is data. It names no plugins: where there are some, each rank takes their names from its own command
line.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.signed import sign, verified
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_json

CONNECT = timedelta(minutes=30)
"""How long a rank looks for rank 0's store: ranks of one start come minutes apart."""
LISTEN_S, LISTEN_DONE_S = 20.0, 120.0
"""How long rank 0, whose process has the store, stays for others to hear that it ends: after a refusal, which the user
waits for, and where all is done, which a rank that comes late must not take for a crash."""
FIRST_LOOK_S, LATER_LOOKS_S = 0.02, 1.0
_KEY, _HEARD = "told", "heard"


@dataclass(frozen=True)
class Ended:
    """Rank 0 ends without work for the others, with this exit status."""

    status: int


class Channel:
    """The way from rank 0 to the others of this start.

    Attributes:
        store: torch's, where process groups are to meet as well; None before it is needed.
    """

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) and int(os.environ.get("GROUP_WORLD_SIZE") or 1) > 1:
            raise UserError("torchrun counts the restarts of each node for itself, so that ranks of several nodes "
                            "would wait for one another. Start it with --max-restarts 0; the same command continues.")
        self.store: Any = None
        self._said = False

    @classmethod
    def here(cls) -> Channel | None:
        """The channel of this process; None where there is nobody to tell."""
        return cls() if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ else None

    def tell(self, work: Work) -> None:
        """The others are to do this work; for rank 0."""
        inputs = {need: _told(work, need) for need in STAGES[work.name].needs}
        self._send({"config": work.config.model_dump(mode="json", exclude={"plugins"}),
                    "with_plugins": bool(work.config.plugins), "fingerprint": work.fingerprint, "drift": work.drift,
                    "inputs": inputs, "files": work.run.files(work.name)})

    def end(self, status: int) -> None:
        """There is nothing for the others to do; for rank 0, if it has told nothing yet."""
        # Where Drover's launcher started the ranks, it ends the others of a start in which one fails.
        if self._said or (status and not self._agent and "DROVER_CHAIN" in os.environ):
            return
        with suppress(RuntimeError):  # where nobody can be reached, why this rank ends counts more
            self._send({"end": status})
            until = time.monotonic() + (LISTEN_S if status else LISTEN_DONE_S)
            while not self._agent and self._heard() < self.world - 1 and time.monotonic() < until:
                time.sleep(FIRST_LOOK_S)

    def listen(self, name: str, plugins: Callable[[], list[str]]) -> Work | Ended:
        """What rank 0 says; for the others.

        plugins: imports those that this process was started with; called where rank 0 has some.

        Raises:
            RuntimeError: rank 0 is gone.
            MessageError: it was not rank 0 that said it.
        """
        self._connect()
        wait_s = FIRST_LOOK_S
        while not self.store.check([_KEY]):  # not one long wait: a signal must be heard meanwhile
            time.sleep(wait_s)
            wait_s = min(LATER_LOOKS_S, 1.5 * wait_s)
        said = json.loads(zlib.decompress(verified(_KEY, self.store.get(_KEY))))
        if "end" in said:
            self.store.add(_HEARD, 1)
            return Ended(said["end"])
        try:
            own = plugins() if said["with_plugins"] else []
            run = ToldRun(Config.model_validate({**said["config"], "plugins": own}), said["inputs"], said["files"])
            return Work(run, name, said["fingerprint"], said["drift"])
        except (ValueError, KeyError) as error:  # of pydantic, for settings that this rank does not know
            raise UserError(f"Rank {self.rank} does not understand what rank 0 told it, so it runs other code: "
                            f"{str(error).splitlines()[0]}. Start all ranks from one folder, in one "
                            f"environment.") from error

    def _heard(self) -> int:
        """How many of the others know that rank 0 ends."""
        return int(self.store.add(_HEARD, 0))

    def _send(self, what: Mapping[str, Any]) -> None:
        self._said = True
        self._connect()
        self.store.set(_KEY, sign(_KEY, zlib.compress(json.dumps(what).encode("utf-8", "surrogatepass"))))

    def _connect(self) -> None:
        if self.store is None:
            import torch.distributed as dist
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.world, timeout=CONNECT,
                is_master=self.rank == 0 and not self._agent, wait_for_workers=False, multi_tenant=not self._agent)
            # An agent's store outlives the ranks that it starts again: nothing of the attempt before is to be found.
            self.store = dist.PrefixStore(f"drover/attempt{self._attempt}", store)


class ToldRun(Run):
    """A run as rank 0 told of it: of the stages before, where they are, what they count and, for some stages, their
    outputs; and the stage's own outside files."""

    def __init__(self, config: Config, inputs: Mapping[str, Mapping[str, Any]], files: list[dict[str, Any]]) -> None:
        super().__init__(config)
        self._inputs, self._files = inputs, files

    def files(self, stage: str) -> list[dict[str, Any]]:
        """The stage's outside files as rank 0 saw them."""
        return self._files

    def stage_folder(self, stage: str) -> Path:
        """Where a stage's outputs are."""
        return Path(self._inputs[stage]["folder"]) if stage in self._inputs else self.own_folder(stage)

    def manifest(self, stage: str) -> Manifest | None:
        """What was told of a stage's manifest."""
        if stage not in self._inputs:
            return None
        told = self._inputs[stage]
        found = Manifest(stage, fingerprint={}, outputs=told["outputs"], counts=told["counts"], config_sha256="",
                         drift=told["drift"])
        found.__dict__["digest"] = told["digest"]  # of outputs that may not be here
        return found


def asked(arguments: Mapping[str, Any]) -> str:
    """What tells one command line from another: all ranks must have been started with the same."""
    return sha256_json(dict(arguments))


def _told(work: Work, need: str) -> dict[str, Any]:
    folder, manifest = work.input(need)
    return {"folder": str(folder), "counts": manifest.counts, "drift": manifest.drift, "digest": manifest.digest,
            "outputs": manifest.outputs if STAGES[work.name].ranks_know_outputs else []}
