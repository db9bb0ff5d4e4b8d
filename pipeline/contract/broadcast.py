"""Rank 0 reads the run folder for all ranks of a stage, and sends the others what they need over the network.

Configuration, state and manifests are files in the run folder. If thousands of ranks read them at the same moment, file
systems break down, and ranks may see different states. So the other ranks open none of these files. They wait at the
store in which torch's process groups meet. There rank 0 writes their work, or that there is nothing to do.
The message contains data only. It does not name plugins: each rank takes their names from its own command line.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import ExternalFile, Manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.signed import sign, verified
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import RANK_VARIABLES, this_job
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Outputs, Record

CONNECT = timedelta(minutes=30)
"""How long a rank tries to reach rank 0's store: ranks of one start may begin minutes apart."""
LISTEN_S, LISTEN_DONE_S = 20.0, 120.0
"""How long rank 0, whose process has the store, waits at its end until all ranks have read this. After a refusal it is
short, because the user waits. If the stage is done it is long: a late rank would take the missing store for a crash."""
FIRST_LOOK_S, LATER_LOOKS_S = 0.02, 1.0
_KEY, _RECEIVED, _PRESENT = "work", "heard", "present"
REPORT_AFTER_S, REPORT_AFTER_LAUNCH_S = 5.0, 60.0
"""How long a rank waits for others until it prints that. Ranks that a launcher has started may import for long."""
_LEFT_OVER = (f" torchrun and Drover's launcher set {', '.join(RANK_VARIABLES)} for each rank. If you start no other "
              f"ranks, they are left over in this shell: `unset {' '.join(RANK_VARIABLES)}`, and give the command "
              f"again.")


class Channel:
    """The connection from rank 0 to the other ranks of this start.

    Attributes:
        store: torch's store, which process groups use, too; None until it is needed.
    """

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) and int(os.environ.get("GROUP_WORLD_SIZE") or 1) > 1:
            raise UserError("torchrun counts the restarts of each node separately, so ranks of several nodes would "
                            "wait for each other. Start it with --max-restarts 0; the same command continues.")
        self.store: Any = None
        self._sent = False

    @classmethod
    def of_process(cls) -> Channel | None:
        """The channel of this process; None if there are no other ranks. UserError if its variables do not fit."""
        if "RANK" not in os.environ:
            return None
        rank, world, address, port = given = [os.environ.get(name, "") for name in RANK_VARIABLES]
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)) or (
                int(world) > 1 and not (address and port.isdecimal())):
            shown = " ".join(f"{name}={value}" for name, value in zip(RANK_VARIABLES, given, strict=True))
            raise UserError(f"The environment has {shown}, which is no rank.{_LEFT_OVER}")
        return cls() if int(world) > 1 else None

    def broadcast(self, work: Work) -> None:
        """Send this work to the other ranks. Only rank 0 calls this."""
        inputs = dict[str, SentInput]()
        for need in STAGES[work.name].needs:
            folder, manifest = work.input(need)
            inputs[need] = {"folder": str(folder), "counts": manifest.counts, "digest": manifest.digest,
                            "outputs": manifest.outputs if STAGES[work.name].ranks_know_outputs else []}
        self._send({"config": work.config.model_dump(mode="json", exclude={"plugins"}),
                    "with_plugins": bool(work.config.plugins), "fingerprint": work.fingerprint,
                    "accepted": work.accepted, "inputs": inputs, "files": work.run.files(work.name)})

    def end(self, status: int) -> None:
        """Send the other ranks that there is nothing to do, unless they have their work. Only rank 0 calls this."""
        # If a rank fails, Drover's launcher itself ends the other ranks of the start.
        if self._sent or (status and not self._agent and this_job().chain):
            return
        with suppress(RuntimeError):  # if no rank can be reached, the reason why this rank ends matters more
            self._send({"end": status})
            until = time.monotonic() + (LISTEN_S if status else LISTEN_DONE_S)
            # The store counts how many other ranks know that rank 0 ends.
            while not self._agent and self.store.add(_RECEIVED, 0) < self.world - 1 and time.monotonic() < until:
                time.sleep(FIRST_LOOK_S)

    def listen(self, name: str, plugins: Callable[[], list[str]]) -> Work | int:
        """Receive what rank 0 sends: work, or the exit status with which it ends. The other ranks call this.

        plugins: imports the plugins that this process was started with; called if rank 0 has plugins.

        Raises:
            RuntimeError: rank 0 has ended.
            MessageError: the message is not from rank 0.
            UserError: this rank does not know a setting of the message.
        """
        store = self.connected()
        wait_s = FIRST_LOOK_S
        while not store.check([_KEY]):  # polled, since one long wait would delay the handling of signals
            time.sleep(wait_s)
            wait_s = min(LATER_LOOKS_S, 1.5 * wait_s)
        message = json.loads(zlib.decompress(verified(_KEY, store.get(_KEY))))
        if "end" in message:
            store.add(_RECEIVED, 1)
            return int(message["end"])
        try:
            own = plugins() if message["with_plugins"] else []
            config = Config.model_validate({**message["config"], "plugins": own})
            run = ReceivedRun(config, message["inputs"], message["files"])
            return Work(run, name, message["fingerprint"], message["accepted"])
        except (ValueError, KeyError) as error:  # from pydantic, for settings that this rank does not know
            raise UserError(f"Rank {self.rank} cannot read the message of rank 0, so it runs other code: "
                            f"{str(error).splitlines()[0]}. Start all ranks from one folder, in one "
                            f"environment.") from error

    def _send(self, what: Mapping[str, object]) -> None:
        self._sent = True
        self.connected().set(_KEY, sign(_KEY, zlib.compress(json.dumps(what).encode("utf-8", "surrogatepass"))))

    def connected(self) -> Any:
        """The store, once it can be reached."""
        if self.store is None:
            import torch.distributed as dist
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            serves = self.rank == 0 and not self._agent
            self._reach(address, port, serves=serves)
            store = dist.TCPStore(
                address, port, self.world, timeout=CONNECT, is_master=serves, wait_for_workers=False,
                multi_tenant=not self._agent,
                master_listen_fd=_bound(address, port) if serves and is_local(address) else None)
            # An agent's store stays when it restarts its ranks: the prefix hides messages of the attempt before.
            self.store = dist.PrefixStore(f"drover/attempt{self._attempt}", store)
        return self.store

    def _reach(self, address: str, port: int, *, serves: bool) -> None:
        """Wait until the store can be reached. torch's own waiting says nothing, and no Ctrl-C ends it. serves: this
        process will have the store; then its address only has to be known."""
        until = time.monotonic() + CONNECT.total_seconds()
        wait = _Wait()
        while time.monotonic() < until:
            try:
                if serves:
                    socket.getaddrinfo(address, port)
                else:
                    socket.create_connection((address, port), 5).close()
                return
            except OSError as error:
                what = "its own address" if serves else "the store of rank 0"
                wait.report(f"rank {self.rank} of {self.world} waits for {what} at {address}:{port}: {error}")
                time.sleep(LATER_LOOKS_S)


class _Wait:
    """A wait for other ranks, which is printed once."""

    def __init__(self) -> None:
        launched = this_job().chain or "TORCHELASTIC_RUN_ID" in os.environ
        self._advice = "" if launched else f".{_LEFT_OVER}"
        self._due = time.monotonic() + (REPORT_AFTER_LAUNCH_S if launched else REPORT_AFTER_S)

    def report(self, what: str) -> None:
        """Print what is waited for, if the wait has been long."""
        if time.monotonic() > self._due:
            say("ranks", f"{what}{self._advice}")
            self._due = math.inf


def await_ranks(store: Any, rank: int, world: int, patience: timedelta) -> None:
    """On rank 0, wait until all ranks have come to the store, and print how many are missing. torch's process groups
    wait in silence."""
    store.add(_PRESENT, 1)
    until = time.monotonic() + patience.total_seconds()
    wait = _Wait()
    while rank == 0 and (present := store.add(_PRESENT, 0)) < world and time.monotonic() < until:
        wait.report(f"rank 0 waits for {world - present} of {world} ranks at {os.environ.get('MASTER_ADDR')}:"
                  f"{os.environ.get('MASTER_PORT')}")
        time.sleep(FIRST_LOOK_S)


def is_local(address: str) -> bool:
    """Whether an address where ranks meet is of the loopback interface on every machine: then all ranks are on one
    machine. A host's name may mean that on the host itself, and a network elsewhere."""
    return address in ("localhost", "::1") or address.startswith("127.")


def _bound(address: str, port: int) -> int:
    """A socket for torch's store, which by itself would listen on every network of the machine."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the launcher, which holds the port
        listening.bind(place)
        return listening.detach()


class SentInput(TypedDict):
    """What rank 0 sends of an earlier stage: fields of its manifest, and where its outputs are."""

    folder: str
    counts: Record
    digest: str
    outputs: Outputs


class ReceivedRun(Run):
    """A run as rank 0 has sent it: folders, counts and (for some stages) outputs of the stages before, and the stage's
    own external files."""

    def __init__(self, config: Config, inputs: Mapping[str, SentInput], files: list[ExternalFile]) -> None:
        super().__init__(config)
        self._inputs = inputs
        self._files = files

    def files(self, stage: str) -> list[ExternalFile]:
        """The stage's external files as rank 0 found them."""
        return self._files

    def stage_folder(self, stage: str) -> Path:
        """Where a stage's outputs are."""
        return Path(self._inputs[stage]["folder"]) if stage in self._inputs else self.own_folder(stage)

    def manifest(self, stage: str) -> Manifest | None:
        """The fields of a stage's manifest that rank 0 has sent."""
        if stage not in self._inputs:
            return None
        sent = self._inputs[stage]
        result = Manifest(stage, fingerprint={}, outputs=sent["outputs"], counts=sent["counts"], config_sha256="")
        result.__dict__["digest"] = sent["digest"]  # of all outputs, which this message may not contain
        return result
