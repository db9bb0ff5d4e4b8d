"""One attempt at a stage: the start record, the units of work, the commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from drover.pipeline.config.loading import config_hash, save_config
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.external_inputs import hashed_now, places, refuse_unread
from drover.pipeline.contract.input_check import Expected, InputCheck, output, outside
from drover.pipeline.contract.job import this_job
from drover.pipeline.contract.locks import await_file_system
from drover.pipeline.contract.manifest import Identity, Manifest, OutsideFiles
from drover.pipeline.contract.run import Run, code_hashes
from drover.pipeline.contract.stages import IMPORTED_FROM, REPOSITORY, SNAPSHOT, STAGES
from drover.pipeline.contract.start_record import STARTED, StartRecord, sound_start
from drover.pipeline.contract.state import (
    PROGRESS,
    STATE,
    Progress,
    ProgressRecord,
    StageState,
    clear,
    now,
    read_state,
    this_start,
    write_state,
)
from drover.pipeline.contract.stopping import Stopped, StopRequest
from drover.pipeline.contract.tasks import (
    PARTS,
    UNITS,
    Ledger,
    Part,
    ShareDone,
    Unit,
    UnitFunction,
    unit_keys,
    with_outputs,
)
from drover.pipeline.contract.threads import usable_cores
from drover.pipeline.contract.workers import Workers
from drover.pipeline.core.console import ProgressBar, duration, first, say
from drover.pipeline.core.errors import UserError, installed_version
from drover.pipeline.core.files import (
    Outputs,
    Record,
    problem_of,
    read_json,
    remove_orphans,
    remove_temporary,
    renamed,
    sha256_json,
)

PACKAGES = ("torch", "numpy", "pyarrow", "pydantic", "sentencepiece", "tokenizers", "tiktoken", "transformers",
            "safetensors", "webdataset", "datasets", "lm_eval", "deepspeed", "orjson", "rensa", "ftfy",
            "fasttext-predict", "fastokens")


@dataclass
class Work:
    """The argument of a stage's body: its configuration, inputs and folder, and methods to do units and to commit.

    part: the share of one phase's units that is done; None for the whole stage. asked: a hash of the command line.
    accepted: changes that `--accept-changes` accepted.
    phases: those whose units were requested so far.
    stop: requests to stop. workers: the processes that do the units. last: how the start before this one ended.
    made: how many units this start has finished.
    afresh: whether the stage was forced, and so must not use what its earlier work has left elsewhere.
    store: torch's store, if rank 0 has sent this work to other ranks; process groups use it, too.
    """

    run: Run
    name: str
    fingerprint: Identity
    accepted: list[str] = field(default_factory=list)
    part: Part | None = None
    began: float = field(default_factory=time.monotonic)
    started: str = field(default_factory=now)
    checks: list[InputCheck] = field(default_factory=list)
    asked: str = ""
    store: Any = None
    phases: list[str] = field(default_factory=list)
    stop: StopRequest = field(default_factory=StopRequest)
    workers: Workers = field(default_factory=Workers)
    last: StageState | None = None
    made: int = 0
    afresh: bool = False

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.run.config

    @property
    def folder(self) -> Path:
        """Where this stage writes."""
        return self.run.own_folder(self.name)

    @property
    def _without_listing(self) -> Identity:
        return {key: value for key, value in self.fingerprint.items() if key != "listing"}

    def say(self, text: str) -> None:
        """Print a line about this stage."""
        say(self.name, text)

    def input(self, stage: str) -> tuple[Path, Manifest]:
        """Folder and manifest of a stage that this one needs."""
        assert stage in STAGES[self.name].needs, f"{self.name} does not declare that it needs {stage}"
        return self.run.stage_folder(stage), self.run.finished(stage)

    def committed(self, *stages: str, chosen: Callable[[Record], bool] = lambda record: True) -> list[Expected]:
        """The committed outputs of stages that this one needs, if their record is `chosen`."""
        return [output(folder, record, stage) for stage in stages for folder, manifest in [self.input(stage)]
                for record in manifest.outputs if chosen(record)]

    def outside(self) -> list[Expected]:
        """The stage's outside files, as they were at its start."""
        return [outside(record, self.name) for record in self.run.files(self.name)]

    def listing(self) -> list[Record]:
        """Name, path, bytes and mtime_ns of the outside files that its units read, as they were at its start."""
        return self.run.listing(self.name)

    def check(self, files: Sequence[Expected]) -> InputCheck:
        """Start to hash inputs in the background. The commit is refused unless all of them are as expected."""
        self.checks.append(InputCheck(files))
        return self.checks[-1]

    def refuse_changed_inputs(self) -> None:
        """Wait until all checked inputs are hashed; UserError if one of them has changed."""
        for check in self.checks:
            check.refuse()

    def do_units(self, phase: str, units: list[Unit], function: UnitFunction,
                 unit_word: str = "units") -> list[Record]:
        """Do every unit that is not done yet, in worker processes. Returns the records in the order of `units`.

        `function(folder, payload)` runs in a worker, writes its outputs atomically and returns a JSON record whose
        `outputs` list holds `output_record`s. The record goes into the ledger in `units/<phase>/`, which commits the
        unit. After a kill, units with a matching record (same stage identity, same payload, outputs in place) are kept.
        So the payload or the identity must contain everything that decides what a unit makes, and files as hashes.

        As a part, the stage does its share of its own phase's units. For an earlier phase it only reads the records.

        Raises:
            ShareDone: the stage runs as a part and has done its share.
            Stopped: there was a request to stop; finished units are kept.
            UserError: the stage runs as a part, and an earlier phase is not done.
        """
        self.phases.append(phase)
        # The listing is left out: a unit must not be done again because a file of another unit has changed.
        keys = unit_keys(self._without_listing, phase, units)
        assert len(keys) == len(units), f"two units of {phase} have one name"
        ledger, part = Ledger(self.folder / UNITS / phase), self.part
        if part is not None and phase != part.phase:
            self._refuse_later(part, phase)
            return self._taken(part, ledger, phase, keys)
        if part is not None:
            units = list(part.of(units))
            keys = {unit.name: keys[unit.name] for unit in units}
        kept = ProgressRecord(self.folder if part is None else None)
        with ProgressBar(self.name, phase, len(units), unit_word) as progress:
            records = with_outputs(ledger.found(keys), self.folder, self.say)
            found = len(records)
            progress.already(found)
            kept.note(Progress(found, len(units), unit_word, phase))
            todo = [unit for unit in units if unit.name not in records]
            for name, record in self.workers.do(function, self.folder, todo, self.stop):
                ledger.add(name, keys[name], record)
                records[name] = record
                self.made += 1
                progress.advance()
                kept.note(Progress(len(records), len(units), unit_word, phase, progress.left_s))
        kept.flush()
        if len(records) < len(units):
            raise self._stopped(phase, len(records), len(units))
        if part is not None:
            self._leave(part, len(units), found)
        return [records[unit.name] for unit in units]

    def _stopped(self, phase: str, done: int, units: int) -> Stopped:
        """Build the error for an interrupted phase. If the previous job finished no unit either, the time limit is too
        short."""
        last = self.last if self.part is None else read_state(self.folder / PARTS, self.part.word)
        before = last.idle if last is not None and last.again else 0
        idle = 0 if self.made else before + 1
        hopeless = self.stop.again and idle > 1
        left = f"{done:,} of {units:,} units of {phase} are done, {units - done:,} are left"
        if hopeless:
            left += (f"; two starts in a row finished none before the time limit. Give the stage more time "
                     f"(launch.{self.name}.time), or make its units smaller")
        return Stopped(f"{self.stop.reason}: {left}", hopeless, again=self.stop.again and not hopeless, units=done,
                       idle=idle)

    def note_stopped(self, stopped: Stopped) -> None:
        """Record that the work was interrupted, for the launcher and for people."""
        folder, file = (self.folder, STATE) if self.part is None else (self.folder / PARTS, self.part.word)
        with suppress(OSError):
            write_state(folder, "failed" if stopped.hopeless else "preempted", file, reason=stopped.reason,
                        **stopped.facts)

    def _refuse_later(self, part: Part, phase: str) -> None:
        """ShareDone if the body has come to a phase after the part's own: then its own phase had no units."""
        phases = STAGES[self.name].phases
        if phase in phases and phases.index(phase) > phases.index(part.phase):
            self._leave(part, 0, 0)

    def _taken(self, part: Part, ledger: Ledger, phase: str, keys: dict[str, str]) -> list[Record]:
        """The records of an earlier phase, whose units other parts have done."""
        records = await_file_system(lambda: ledger.found(keys), lambda found: len(found) == len(keys))
        if missing := [name for name in keys if name not in records]:
            raise UserError(
                f"{self.name} cannot start its phase {part.phase}: in the phase {phase}, {len(missing):,} of "
                f"{len(keys):,} units are not done ({first(missing)}). Do them with --part I/N --phase {phase}, or run "
                f"{self.name} without --part, which does all remaining units.")
        return [records[name] for name in keys]

    def _leave(self, part: Part, units: int, found: int) -> NoReturn:
        part.mark(self.folder, sha256_json(self.fingerprint), {
            "units": units, "found": found, "wall_s": round(time.monotonic() - self.began, 3), "at": now(),
            "host": platform.node(), "job": os.environ.get("SLURM_JOB_ID", "")})
        self.say(f"part {part} of {part.phase} is done; running {self.name} without --part finishes it")
        raise ShareDone

    def commit(self, outputs: Outputs, counts: Record, *, verified: bool = False,
               files: OutsideFiles | None = None, scratch: Sequence[Path] = ()) -> Manifest:
        """Verify the outputs and write the manifest, which makes the stage done.

        Args:
            verified: the hashes come from reading the outputs back when they were written (`output_record`), so only
                sizes are compared now. For a unit of an earlier attempt that was some time ago. If a bit has flipped
                since, the next stage finds it, because it hashes its inputs. By default every output is read back now.
            files: records of the files that its units read, for a stage with `unit_files`
                (`external_inputs.gathered`). None: these files are hashed now.
            scratch: files and folders to remove once the manifest exists. The records of units are removed, too, unless
                there is one phase, whose lost outputs can be made again one by one.

        Raises:
            UserError: an output differs from what was written (failing disk, a second writer), a checked input has
                changed, or a file has changed since the stage's start.
        """
        if self.part is not None:
            self._leave(self.part, 0, 0)  # the part's phase had no units
        self.refuse_changed_inputs()
        files = hashed_now(self.listing()) if files is None else files
        refuse_unread(self.listing(), files, self.name)
        remove_temporary(self.folder)  # also files that an orphan of a killed run has written since
        for record in outputs:
            path = self.folder / record["path"]
            if problem := problem_of(path, record, hashed=not verified):
                if not verified:  # so that its unit is done again
                    path.unlink(missing_ok=True)
                raise UserError(f"{problem}: it does not read back as it was written, so {self.name} is not committed. "
                                f"Check the disk, and that no other program writes there; then run the stage again.")
        manifest = Manifest(
            stage=self.name, fingerprint=self._fingerprint(files), outputs=outputs, counts=counts,
            config_sha256=config_hash(self.config),
            files=sorted([*self.run.files(self.name), *files], key=lambda record: str(record["name"])),
            places=places(STAGES[self.name], self.config), accepted=self.accepted,
            wall_s=round(time.monotonic() - self.began, 3), started=self.started, finished=now(),
            software=software_versions(), git=git_state(), code=code_hashes(STAGES[self.name], self.config),
            execution={**this_start(), "processes": processes(self.config), "cores": os.cpu_count(),
                       "world_size": int(os.environ.get("WORLD_SIZE", "1"))},
            start=asdict(sound_start(self.folder)))
        gone = [self.folder / STARTED, *scratch]
        if self.phases:  # of a finished stage, status shows what the manifest counts
            gone.append(self.folder / PROGRESS)
        if len(self.phases) > 1:  # otherwise a lost output is made again alone
            gone.append(self.folder / UNITS)
        manifest.scratch = sorted(path.relative_to(self.folder).as_posix() for path in gone)
        manifest.write(self.folder)
        with suppress(OSError):  # the next call that finds the stage done tries again
            clear(self.folder, manifest)
        self.say(f"done in {duration(manifest.wall_s)}")
        return manifest

    def _fingerprint(self, files: OutsideFiles) -> Identity:
        """The identity of the finished stage: hashes of files take the place of the listing."""
        known = self._without_listing
        return {**known, "files": known["files"] | {record["name"]: record["sha256"] for record in files}}


def processes(config: Config) -> int:
    """How many workers to use on this machine, or in a Slurm job on its part of the node."""
    # The affinity of a job is the whole node if Slurm does not bind processes.
    allotted = int(os.environ.get("SLURM_CPUS_ON_NODE") or 0)
    return config.launch.processes or min(usable_cores(), allotted or sys.maxsize)


def begin(run: Run, name: str, fingerprint: Identity, accepted: list[str], part: Part | None = None,
          forced_by: str | None = None) -> Work:
    """Prepare the stage's folder: remove files of killed writers, record the start and the configuration.

    Args:
        forced_by: the `--force-id`, which the start record keeps.
    """
    work = Work(run, name, fingerprint, accepted, part)
    work.folder.mkdir(parents=True, exist_ok=True)
    if part is None:
        remove_temporary(work.folder)  # not for a part: without locks, other parts may be writing
    remove_orphans(run.folder / "config.yaml")
    save_config(run.config, run.folder / "config.yaml")
    chain = this_job().chain or None  # all starts of a chain count as one attempt
    before = sound_start(work.folder)
    if chain is not None and chain == before.chain:
        work.started = before.at or work.started
    # The start record keeps accepted changes and hashes until the manifest has them, so that they survive a kill.
    StartRecord(fingerprint, work.started, accepted, run.files(name), forced_by or before.force_id,
                chain).write(work.folder)
    if part is None:
        work.last = read_state(work.folder)
        write_state(work.folder, "running")
    return work


def set_aside(folder: Path, keep: bool) -> Path | None:
    """Remove a stage's folder before a rebuild. With `keep` it is renamed instead (checkpoints are never deleted), and
    the new path is returned."""
    if not folder.exists():
        return None
    if not keep or {path.name for path in folder.iterdir()} <= {STATE}:  # a refused start leaves only this
        shutil.rmtree(folder)
        return None
    return renamed(folder, f"{folder.name}.replaced")


def software_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change outputs. Does not import them."""
    versions = {package: version for package in PACKAGES if (version := installed_version(package)) is not None}
    return {"python": platform.python_version(), **versions}


def git_state() -> Record:
    """Commit of the checkout (or of the one that this is a copy of), and whether it has changes; empty without git."""
    if (IMPORTED_FROM / SNAPSHOT).is_file():  # a copy in runs/ may be inside of a checkout that has changed since
        snapshot = read_json(IMPORTED_FROM / SNAPSHOT)
        return {"commit": snapshot["commit"], "changed": snapshot["changed"]}
    commit, changes = git(REPOSITORY, "rev-parse", "HEAD"), git(REPOSITORY, "status", "--porcelain", "-uno")
    return {"commit": commit.strip(), "changed": bool(changes)} if commit and changes is not None else {}


def git(repository: Path, *arguments: str) -> str | None:
    """Git's output; None without git, or if the folder is no repository itself (it may be inside one)."""
    within = {**os.environ, "GIT_CEILING_DIRECTORIES": str(repository.resolve().parent)}
    try:
        return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True,
                              timeout=60, errors="replace", env=within).stdout
    except (OSError, subprocess.SubprocessError):
        return None
