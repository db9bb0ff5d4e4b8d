"""One attempt at a stage: the start record, the tasks, the commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from drover.pipeline.config.loading import config_hash, save_config
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.inputs import Expected, InputCheck, external, hashed_now, output, refuse_unread
from drover.pipeline.contract.locks import Claims, turn
from drover.pipeline.contract.manifest import (
    MANIFEST,
    OTHER_FILES,
    STARTED,
    ExternalFile,
    Fingerprint,
    GitState,
    ListedFile,
    Manifest,
    StartRecord,
    start_or_empty,
)
from drover.pipeline.contract.run import Run, code_hashes, places
from drover.pipeline.contract.stages import IMPORTED_FROM, REPOSITORY, SNAPSHOT, STAGES
from drover.pipeline.contract.state import (
    PROGRESS,
    STATE,
    Progress,
    ProgressRecord,
    StageState,
    clear,
    now,
    read_state,
    this_job,
    this_start,
    write_state,
)
from drover.pipeline.contract.workers import (
    CLAIMS,
    TASKS,
    Ledger,
    Stopped,
    StopRequest,
    Task,
    TaskFunction,
    Workers,
    with_outputs,
)
from drover.pipeline.core.background import usable_cores
from drover.pipeline.core.console import ProgressBar, duration, readable, say
from drover.pipeline.core.errors import UserError, installed_version
from drover.pipeline.core.files import (
    Outputs,
    Record,
    problem_of,
    read_json,
    remove,
    remove_orphans,
    remove_temporary,
    renamed,
    sha256_json,
)

PACKAGES = ("torch", "numpy", "pyarrow", "pydantic", "sentencepiece", "tokenizers", "tiktoken", "transformers",
            "safetensors", "webdataset", "datasets", "lm_eval", "deepspeed", "orjson", "rensa", "ftfy",
            "fasttext-community", "fastokens", "resiliparse", "fastwarc", "trafilatura", "pypdfium2")


LOOK_S, LOOK_SHARE = 1.0, 10.0
"""Seconds between looks at what other processes have done, and how many times as long as a look if it takes long."""
WRITTEN_S = 5
"""Seconds between looks at what tasks have written."""


class DoneElsewhere(Exception):  # noqa: N818 - not an error
    """Another process that shares the stage has committed it."""


@dataclass
class Work:
    """The argument of a stage's body: its configuration, inputs and folder, and methods to do tasks and to commit.

    accepted: changes that `--accept-changes` accepted.
    element: name of this process among those that share the tasks (`--element`); "" if it does them alone.
    command: a hash of the command line. passes: names of the passes so far; earlier: a hash of their outputs.
    stop: requests to stop. workers: the processes that do the tasks. last: how the start before this one ended.
    made: how many tasks this start has finished.
    from_scratch: whether the stage was forced, and so must not use what its earlier work has left elsewhere.
    store: torch's store, if rank 0 has sent this work to other ranks; process groups use it, too.
    """

    run: Run
    name: str
    fingerprint: Fingerprint
    accepted: list[str] = field(default_factory=list)
    element: str = ""
    began: float = field(default_factory=time.monotonic)
    started: str = field(default_factory=now)
    checks: list[InputCheck] = field(default_factory=list)
    command: str = ""
    store: Any = None
    passes: list[str] = field(default_factory=list)
    earlier: str = ""
    stop: StopRequest = field(default_factory=StopRequest)
    workers: Workers = field(default_factory=Workers)
    last: StageState | None = None
    made: int = 0
    from_scratch: bool = False

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.run.config

    @property
    def folder(self) -> Path:
        """Where this stage writes."""
        return self.run.own_folder(self.name)

    @property
    def _without_listing(self) -> Fingerprint:
        result = self.fingerprint.copy()
        result.pop("listing", None)
        return result

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

    def external_files(self) -> list[Expected]:
        """The stage's external files, as they were at its start."""
        return [external(record, self.name) for record in self.run.files(self.name)]

    def listing(self) -> list[ListedFile]:
        """Name, path, bytes and mtime_ns of the external files that its tasks read, as they were at its start."""
        return self.run.listing(self.name)

    def check(self, files: Sequence[Expected]) -> InputCheck:
        """Start to hash inputs in the background. The commit is refused unless all of them are as expected."""
        self.checks.append(InputCheck(files))
        return self.checks[-1]

    def refuse_changed_inputs(self) -> None:
        """Wait until all checked inputs are hashed; UserError if one of them has changed."""
        for check in self.checks:
            check.refuse()

    @property
    def state_file(self) -> str:
        """Where this attempt's status is, in the stage's folder. An element records only that it was stopped."""
        return f"{CLAIMS}/{self.element}.json" if self.element else STATE

    def run_pass(self, name: str, tasks: list[Task], function: TaskFunction, task_word: str = "tasks") -> list[Record]:
        """Do a pass: every task that is not done yet, in worker processes. Returns the records in the order of `tasks`.

        `function(folder, payload)` runs in a worker, writes its outputs atomically and returns a JSON record whose
        `outputs` list holds `output_record`s. The record goes into the ledger in `units/<name>/`, which commits the
        task. After a kill, tasks with a matching record are kept: with the same stage identity, the same outputs of all
        passes before, the same payload, and outputs in place. So these must contain everything that decides what a task
        makes, and files as hashes.

        If several processes share the stage, each does tasks that no other has claimed. All return when the pass is
        done.

        Raises:
            Stopped: there was a request to stop; finished tasks are kept.
            DoneElsewhere: another process that shares the stage has committed it.
        """
        self.passes.append(name)
        # The listing is left out: a task must not be done again because a file of another task has changed.
        before = sha256_json([self._without_listing, name, self.earlier])
        keys = {task.name: sha256_json([before, task.payload]) for task in tasks}
        assert len(keys) == len(tasks), f"two tasks of {name} have one name"
        ledger = Ledger(self.folder / TASKS / name)
        records = dict[str, Record]()
        remaining = keys
        void = dict[str, str]()
        progress_record = ProgressRecord(self.folder)
        began = time.time()
        with ProgressBar(self.name, name, len(tasks), task_word) as progress, \
                Claims(self.folder / CLAIMS / name) as claims:

            def claimed() -> Iterator[Task]:
                return (task for task in tasks if task.name in remaining and claims.take(keys[task.name], void))

            progress.so_far = lambda: _written_so_far(self.folder, began, time.time() // WRITTEN_S)
            while True:
                looked_at = time.monotonic()
                made_before = self.made
                records |= with_outputs(ledger.recorded(remaining), self.folder, self.say)
                remaining = {task: key for task, key in keys.items() if task not in records}
                progress.already(len(records))
                progress_record.note(Progress(len(records), len(tasks), task_word, name))
                for task, record in self.workers.do(function, self.folder, claimed(), self.stop):
                    ledger.add(task, keys[task], record)
                    claims.held.discard(keys[task])
                    records[task] = record
                    self.made += 1
                    progress.advance()
                    done = len(records)
                    if self.element and progress_record.due:  # others have done tasks, too
                        done = max(done, claims.count() - len(claims.held))
                    progress_record.note(Progress(done, len(tasks), task_word, name, progress.left_s))
                remaining = {task: key for task, key in remaining.items() if task not in records}
                if not remaining or self.stop.heard:
                    break
                # Find void claims first: what their owners have finished is in the ledger then.
                void = claims.void(remaining.values())
                if self.element and (self.folder / MANIFEST).exists():
                    raise DoneElsewhere
                if self.made == made_before and not void:
                    time.sleep(max(LOOK_S, LOOK_SHARE * (time.monotonic() - looked_at)))
            waited = self.element and not claims.held  # for tasks of others
        progress_record.flush()
        if remaining:
            raise self._stopped(name, len(records), len(tasks), idle=not self.made and not waited)
        result = [records[task.name] for task in tasks]
        self.earlier = sha256_json([self.earlier, *(
            [output["path"], output["sha256"]] for record in result for output in record.get("outputs", []))])
        return result

    def _stopped(self, name: str, done: int, tasks: int, *, idle: bool) -> Stopped:
        """Build the error for an interrupted pass. If this start was `idle` (it finished no task), and the one before
        it too, the time limit is too short."""
        starts = 1 + (self.last.idle if self.last is not None and self.last.again else 0) if idle else 0
        hopeless = self.stop.again and starts > 1
        left = f"{done:,} of {tasks:,} tasks of {name} are done, {tasks - done:,} are left"
        if hopeless:
            left += (f"; two starts in a row finished none before the time limit. Give the stage more time "
                     f"(launch.{self.name}.time), or make its tasks smaller")
        return Stopped(f"{self.stop.reason}: {left}", hopeless, again=self.stop.again and not hopeless, units=done,
                       idle=starts)

    def note_stopped(self, stopped: Stopped) -> None:
        """Note that the work was interrupted, for the launcher and for people."""
        with suppress(OSError):
            write_state(self.folder, "failed" if stopped.hopeless else "preempted", self.state_file,
                        reason=stopped.reason, **stopped.facts)

    def commit(self, outputs: Outputs, counts: Record, *, verified: bool = False,
               files: list[ExternalFile] | None = None, scratch: Sequence[Path] = ()) -> Manifest:
        """Verify the outputs and write the manifest, which makes the stage done.

        Args:
            verified: the hashes come from reading the outputs back when they were written (`output_record`), so only
                sizes are compared now. For a task of an earlier attempt that was some time ago. If a bit has flipped
                since, the next stage finds it, because it hashes its inputs. By default every output is read back now.
            files: records of the files that its tasks read, for a stage with `task_files`
                (`external_inputs.gathered`). None: these files are hashed now.
            scratch: files and folders to remove once the manifest exists. The records of tasks are removed with them,
                except those of the last phase, with which a lost output is made again.

        Raises:
            UserError: an output differs from what was written (failing disk, a second writer), a checked input has
                changed, or a file has changed since the stage's start.
        """
        self.refuse_changed_inputs()
        with turn(self.run.folder, self.name) if self.element else nullcontext():
            if self.element and (self.folder / MANIFEST).exists():
                raise DoneElsewhere
            return self._commit(outputs, counts, verified, files, scratch)

    def _commit(self, outputs: Outputs, counts: Record, verified: bool, files: list[ExternalFile] | None,
                scratch: Sequence[Path]) -> Manifest:
        files = hashed_now(self.listing()) if files is None else files
        refuse_unread(self.listing(), files, self.name)
        remove_temporary(self.folder)  # also files that an orphan of a killed run has written since
        for record in outputs:
            path = self.folder / record["path"]
            if problem := problem_of(path, record, hashed=not verified):
                if not verified:  # so that its task is done again
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
            start=asdict(start_or_empty(self.folder)))
        gone = [self.folder / STARTED, *scratch]
        if self.passes:  # of a finished stage, status shows what the manifest counts
            gone.append(self.folder / PROGRESS)
            # With the records of the last pass, a lost output is made again alone.
            gone += [self.folder / CLAIMS, *(self.folder / TASKS / name for name in self.passes[:-1])]
        manifest.scratch = sorted(path.relative_to(self.folder).as_posix() for path in gone)
        manifest.write(self.folder)
        with suppress(OSError):  # the next call that finds the stage done tries again
            clear(self.folder, manifest)
        self.say(f"done in {duration(manifest.wall_s)}")
        return manifest

    def _fingerprint(self, files: list[ExternalFile]) -> Fingerprint:
        """The identity of the finished stage: hashes of files take the place of the listing."""
        known = self._without_listing
        return {**known, "files": known["files"] | {record["name"]: record["sha256"] for record in files}}


@lru_cache(maxsize=1)
def _written_so_far(folder: Path, since: float, look: float) -> str:
    """How much the first tasks have written since a time, for one may take an hour. look: another one reads the folder
    again."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # its task ends meanwhile
                if name.endswith(".tmp") and (status := Path(place, name).stat()).st_mtime >= since:
                    size += status.st_size
    return f"  {readable(size)} written"


def processes(config: Config) -> int:
    """How many workers to use on this machine, or in a Slurm job on its part of the node."""
    # The affinity of a job is the whole node if Slurm does not bind processes.
    allotted = int(os.environ.get("SLURM_CPUS_ON_NODE") or 0)
    return config.launch.processes or min(usable_cores(), allotted or sys.maxsize)


def begin(run: Run, name: str, fingerprint: Fingerprint, accepted: list[str], element: str = "",
          forced_by: str | None = None) -> Work:
    """Prepare the stage's folder: remove files of killed writers, record the start and the configuration.

    Args:
        forced_by: the `--force-id`, which the start record keeps.
    """
    work = Work(run, name, fingerprint, accepted, element)
    work.folder.mkdir(parents=True, exist_ok=True)
    if not element:  # without locks, other elements may be at work
        remove_temporary(work.folder)
        remove(work.folder / CLAIMS)
    remove_orphans(run.folder / "config.yaml")
    save_config(run.config, run.folder / "config.yaml")
    chain = this_job().chain or None  # all starts of a chain count as one attempt
    before = start_or_empty(work.folder)
    if chain is not None and chain == before.chain:
        work.started = before.at or work.started
    # The start record keeps accepted changes and hashes until the manifest has them, so that they survive a kill.
    StartRecord(fingerprint, work.started, accepted, run.files(name), forced_by or before.force_id,
                chain).write(work.folder)
    work.last = read_state(work.folder, work.state_file)
    if not element:
        write_state(work.folder, "running")
    return work


def join(run: Run, name: str, element: str) -> Work | None:
    """The work of a process that joins others at work on the stage; None if they have finished it.

    Raises:
        UserError: this process would not do the same work.
    """
    state = run.state(name)
    if state.kind == "done":
        return None
    if state.kind != "resumable" or OTHER_FILES in str(state):
        raise UserError(f"Other processes work on {name}, and this one would do other work: {state}. Wait for them, or "
                        f"stop them first.")
    work = Work(run, name, run.fingerprint(name), element=element)
    work.last = read_state(work.folder, work.state_file)
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


def git_state() -> GitState:
    """Commit of the checkout (or of the one that this is a copy of), and whether it has changes; empty without git."""
    if (IMPORTED_FROM / SNAPSHOT).is_file():  # a copy in runs/ may be inside of a checkout that has changed since
        snapshot = read_json(IMPORTED_FROM / SNAPSHOT)
        return {"commit": snapshot["commit"], "changed": snapshot["changed"]}
    commit, changes = git(REPOSITORY, "rev-parse", "HEAD"), git(REPOSITORY, "status", "--porcelain", "-uno")
    return {"commit": commit.strip(), "changed": bool(changes)} if commit and changes is not None else {}


def git(repository: Path, *arguments: str) -> str | None:
    """Git's output; None without git, or if the folder is no repository itself (it may be inside one)."""
    # Git refuses a repository of another user that it has to look for: its configuration may start programs. Drover
    # runs that user's code from there already. So a run from a shared checkout has its commit.
    within = {**os.environ, "GIT_DIR": str(repository.resolve() / ".git")}
    try:
        return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True,
                              timeout=60, errors="replace", env=within).stdout
    except (OSError, subprocess.SubprocessError):
        return None
