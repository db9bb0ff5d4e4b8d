"""The launcher as a program, with stages that do next to nothing, steered by environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from drover.pipeline.contract.stages import REPOSITORY, STAGES
from tests.launch.launcher import SETTINGS, holding
from tests.waiting import HANG_S, wait_for

FAKE_STAGE = '''
"""A stage for tests: FAKE_<name> says how it goes wrong."""
import os, signal, sys, time
from pathlib import Path
import fakes
from drover.pipeline.config.section import identity
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.broadcast import Channel
from drover.pipeline.core.files import output_record, sha256_json, write_text

NAME = "{name}"
RANK = os.environ.get("RANK", "0")


def work(work):
    manner = os.environ.get("FAKE_" + NAME, "")
    pids = Path(os.environ["FAKE_PIDS"])
    (pids / f"{NAME}-{RANK}").write_text(str(os.getpid()))
    (pids / f"{NAME}-{RANK}.secret").write_text(os.environ.get("DROVER_STORE_SECRET", ""))
    print(f"{NAME} rank {RANK} of {os.environ.get('WORLD_SIZE', '-')} "
          f"threads {os.environ.get('OMP_NUM_THREADS', '-')} terminal {sys.stdout.isatty()}", flush=True)
    if manner == "slow":
        stopped = []
        if "RANK" in os.environ:
            signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which a launcher elsewhere has blocked
        (pids / f"{NAME}-{RANK}.ready").touch()
        end = time.monotonic() + 3600
        while time.monotonic() < end and not stopped:
            time.sleep(0.05)
        (pids / f"{NAME}-{RANK}.saved").touch()
        return
    if RANK != "0":
        while not (work.folder / "manifest.json").exists():
            time.sleep(0.05)
        return
    for other in range(int(os.environ.get("WORLD_SIZE", "1"))):  # which may still listen to what rank 0 tells them
        while not (pids / f"{NAME}-{other}").exists():
            time.sleep(0.05)
    content = sha256_json([NAME, work.fingerprint])
    write_text(work.folder / "out.txt", content)
    work.commit([output_record(work.folder, work.folder / "out.txt")], {"files": 1})


if __name__ == "__main__":
    if os.environ.get("FAKE_" + NAME):  # its ranks do not meet: they would import torch for that
        Channel.of_process = lambda: None
        if RANK != "0":
            sys.exit(work(None))
    sys.exit(stage_main(NAME, work))
'''
FAKES = '''
"""Puts the fakes in place of the stages; run as a program, it is the launcher."""
import sys
from dataclasses import replace
from drover.pipeline.contract.stages import STAGES

STAGES.update({name: replace(stage, own_module=f"fake_{name}", functions={}, task_modules=())
               for name, stage in STAGES.items()})
if __name__ == "__main__":
    from drover.launch.submit import main
    sys.exit(main())
'''


@dataclass
class House:
    """The fakes, a folder to work in, and the process ids that the stages left."""

    fakes: Path
    work: Path
    pids: Path

    @property
    def run(self) -> Path:
        """The run folder of `config.yaml`."""
        return self.work / "runs" / "trial"

    def command(self, *arguments: str) -> list[str]:
        """The launcher's command line."""
        return [sys.executable, str(self.fakes / "fakes.py"), *arguments]

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of the launcher."""
        kept = {key: value for key, value in os.environ.items()
                if not key.startswith(("SLURM_", "OMP_NUM", "PYTHONPATH", "RANK", "WORLD_SIZE"))}
        # No Slurm and no GPU, whatever this machine has.
        return {**kept, "FAKE_PIDS": str(self.pids), "PATH": "/nowhere", "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(map(str, (self.fakes, REPOSITORY))), **more}

    def submit(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the launcher to its end."""
        return subprocess.run(self.command("--config", "config.yaml", *arguments), cwd=self.work, text=True,
                              env=self.environ(**more), capture_output=True, timeout=HANG_S, check=False)

    def started(self) -> list[str]:
        """Stages and ranks whose body ran, as `stage-rank`."""
        return sorted(path.name for path in self.pids.iterdir() if path.suffix == "")

    def check_secret(self) -> None:
        """The ranks of train sign with one secret, which no file holds."""
        secret, = {(self.pids / f"train-{rank}.secret").read_text() for rank in range(2)}
        assert len(secret) == 64 and not holding(self.work, secret)

    def wait_for_bodies(self, stage: str, ranks: int) -> None:
        """Wait until the bodies of a slow stage are at work."""
        wait_for(lambda: len(list(self.pids.glob(f"{stage}-?.ready"))) == ranks)

    def alive(self) -> list[str]:
        """Started bodies whose process still exists."""
        return [name for name in self.started() if runs(self.pids / name)]


def runs(note: Path) -> bool:
    """Whether the process whose id a file holds is there, and no zombie."""
    try:
        return Path("/proc", note.read_text().strip(), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def build_house(folder: Path) -> House:
    """Make the fakes and a working folder under `folder`."""
    house = House(folder / "fakes", folder / "a folder", folder / "pids")
    for place in (house.fakes, house.work, house.pids):
        place.mkdir()
    for name in STAGES:
        (house.fakes / f"fake_{name}.py").write_text(FAKE_STAGE.replace("{name}", name))
    (house.fakes / "fakes.py").write_text(FAKES)
    (house.work / "config.yaml").write_text(SETTINGS)
    return house
