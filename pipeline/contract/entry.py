"""Run a stage from its command line: `python -m drover.pipeline.<stage>`. Arguments, state, refusals and errors."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from typing import NoReturn

from drover.pipeline.config.checks import absent_packages
from drover.pipeline.config.command_line import add_settings
from drover.pipeline.config.loading import load_config, refuse_impossible
from drover.pipeline.config.section import blocked, make_folder
from drover.pipeline.contract.broadcast import Channel
from drover.pipeline.contract.inputs import listed_files
from drover.pipeline.contract.locks import in_use, lock, lock_holder, lock_to_share, share, turn
from drover.pipeline.contract.manifest import (
    MANIFEST,
    OTHER_FILES,
    Manifest,
    change_start,
    in_words,
    read_manifest,
    restore_start,
    start_or_empty,
)
from drover.pipeline.contract.run import Run, acceptable, places
from drover.pipeline.contract.stage_work import DoneElsewhere, Work, begin, join, processes, set_aside
from drover.pipeline.contract.stages import STAGES, Stage, before
from drover.pipeline.contract.state import (
    PROGRESS,
    STATE,
    StageJob,
    clear,
    left_files,
    read_state,
    set_this_job,
    this_job,
    write_state,
)
from drover.pipeline.contract.workers import Stopped, StopRequest, Workers, finished_tasks
from drover.pipeline.core.background import end_with_parent
from drover.pipeline.core.console import INTERRUPTED, Parser, complain, first, say
from drover.pipeline.core.errors import UnusableInputError, UserError, is_full_disk, listed
from drover.pipeline.core.files import sha256_json

NETWORK_S = 75.0
"""Longer than the default time for which network file systems remember that a file is missing."""
SILENCE_S = 3.0
"""How long a rank other than 0 waits before it prints its error."""


def stage_main(name: str, body: Callable[[Work], None], arguments: list[str] | None = None) -> int:
    """Run the stage `name` unless it is done. Returns the process's exit status.

    `body(work)` does the work and calls `work.commit`. If a stage has ranks, each of them runs this, and only rank 0
    writes. A body that was stopped may record this as the stage's state (train does) and return without a commit. Then
    the same command continues.
    """
    command = parser(name)
    options = command.parse_intermixed_args(arguments)
    if options.config is None:
        command.error(f"no configuration is given: {command.prog} FILE.yaml")
    set_this_job(options.job)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())  # the elastic agent's workers are in sessions of their own and would outlive it
    try:
        return StageAttempt(name, body, options)()
    except Exception as error:
        # Keep only the message: the traceback would keep the lock file open.
        if (text := _reason(error)) is None:
            raise
        status = error.exit_status if isinstance(error, UserError) else UserError.exit_status
        if not is_leader():
            # Most often all ranks have the same error. Rank 0 prints it and exits, and this ends the other ranks while
            # they sleep. An error that only this rank has must be printed, though.
            time.sleep(SILENCE_S)
        complain(f"{name} stops here{'' if is_leader() else ' on rank ' + os.environ['RANK']}: {text}")
        return status
    except KeyboardInterrupt:
        say(name, "stopped; the same command continues")
        return INTERRUPTED


def end_process(status: int) -> NoReturn:
    """End a rank's process immediately with `status`.

    The interpreter is not shut down. During a shutdown, threads of process groups sometimes abort the process
    ("terminate called without an active exception"), and a rank that has done all its work would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def parser(name: str) -> Parser:
    """The command line that all stages share."""
    result = Parser(prog=f"python -m drover.pipeline.{name}", description=f"Run the stage {name} of a run.")
    add_settings(result)
    forcing = result.add_mutually_exclusive_group()
    forcing.add_argument("--force", action="store_true",
                         help="rebuild the stage (training output is renamed, never deleted)")
    forcing.add_argument("--force-id", metavar="ID",
                         help="like --force, but once for this ID: a command with the same ID continues")
    result.add_argument("--element", metavar="NAME", default="",
                        help="share the stage's tasks with other processes, also on other machines, that run the same "
                             "command with other names")
    result.add_argument("--accept-changes", action="store_true",
                        help="train: continue although inputs or settings changed, and record this; the stages after "
                             "it: rebuild what has changed")
    result.add_argument("--job", type=StageJob.parse, default=StageJob(), help=argparse.SUPPRESS)
    return result


def continues(run: Run, name: str) -> bool:
    """Whether this job continues what the same submission has started."""
    chain = this_job().chain
    return bool(chain) and start_or_empty(run.own_folder(name)).chain == chain


class StageAttempt:
    """One attempt at a stage, by one process. If there are several ranks, rank 0 decides what to do (`lead`) and sends
    this to the others, which do it (`follow`).

    Attributes:
        name, body, options: the stage, its function, and the command line.
        channel: the connection to the other ranks; None if there are none.
        run: the run as this process reads it. workers: processes for tasks.
    """

    def __init__(self, name: str, body: Callable[[Work], None], options: argparse.Namespace) -> None:
        self.name = name
        self.body = body
        self.options = options
        self.channel = Channel.of_process()

    @property
    def stage(self) -> Stage:
        """The stage. A plugin's stage is known once the configuration is loaded."""
        return STAGES[self.name]

    def __call__(self) -> int:
        """Do what there is to do. Returns the process's exit status."""
        if self.channel is None:
            return self.lead()
        if not is_leader():
            return self.follow(self.channel)
        status = 1
        try:
            status = self.lead()
        except UserError as error:
            status = error.exit_status
            raise
        finally:
            self.channel.end(status)
        return status

    def follow(self, channel: Channel) -> int:
        """Do what rank 0 sends."""
        try:
            work = channel.listen(self.name, lambda: load_config(
                self.options.config, self.options.overrides, check=False).plugins)
        except RuntimeError:
            say(self.name, f"rank 0 ended before it sent rank {channel.rank} its work")
            return 1
        if isinstance(work, int):
            if work:
                time.sleep(SILENCE_S)  # so that rank 0 ends first, with its reason
            return work
        self._do(work)
        return 0

    def lead(self) -> int:
        """Decide what there is to do, and do it together with the other ranks."""
        self.run = Run(load_config(self.options.config, self.options.overrides, check=False))
        if self.name not in STAGES:
            raise UserError(f"stage_main is called with the name {self.name!r}, but no stage of this name is "
                            f"registered. The stages are {', '.join(STAGES)}.")
        # A plugin's stage may have tasks, too.
        with_workers = self.stage.workers or bool(self.stage.own_module and not self.stage.ranks)
        _refuse_element(self.name, self.options, with_workers)
        if (obstacle := blocked(self.run.folder)) is not None:
            raise UserError(obstacle)
        # Settings that cannot work are refused before files are hashed, unless the stage may be up to date. Its state
        # stays.
        if forced(self.run, self.name, self.options) or not (self.run.stage_folder(self.name) / MANIFEST).exists():
            refuse_impossible(self.run.config, self.options.config)
        if self._is_done():
            report_done(self.run, self.name)  # without a lock: other processes may be reading the stage
            clear_done(self.run, self.name, locked=False)
            return 0
        refuse_impossible(self.run.config, self.options.config)
        for module in self.stage.task_modules:
            importlib.import_module(module)
        make_folder(self.run.folder)
        with closing(Workers(processes(self.run.config) if with_workers else 1)) as self.workers:
            try:
                return self._locked()
            except (Exception, KeyboardInterrupt) as error:
                self._note_end(error)
                raise

    def _is_done(self) -> bool:
        """Whether the stage is up to date; UserError if an input or a package is missing."""
        run = self.run
        name = self.name
        try:
            for need in self.stage.needs:
                self._await_manifest(need)
                run.finished(need)  # refuses before anything is written
            self._refuse_changed_ancestors()
            # Without a manifest an element stops here: the one that starts the stage hashes the files for all.
            done = (not forced(run, name, self.options) and (not self.options.element or run.manifest(name) is not None)
                    and run.state(name).kind == "done")
            if not done and (problems := absent_packages(run.config, name)):
                raise UserError(listed(problems))
            return done
        except UserError as error:
            with suppress(UserError, OSError):  # if another process holds the stage, that one writes its state
                other = lock(run.folder, name) if _is_followed(run, name) else None
                self._note_end(error)
                del other
            raise

    def _note_end(self, error: BaseException) -> None:
        """Write why the stage ended; not of an element, because others may be at work. After Ctrl-C, only if the stage
        itself has not recorded it."""
        if self.options.element:
            return
        folder = self.run.own_folder(self.name)
        with suppress(OSError):  # the disk may be full; then the final status stays "running"
            if not isinstance(error, Exception):
                if (state := read_state(folder)) is not None and state.status == "running":
                    write_state(folder, "preempted", reason="interrupted")
            elif (reason := _reason(error)) is not None and _is_followed(self.run, self.name):
                write_state(folder, "failed", reason=reason)

    def _await_manifest(self, need: str) -> None:
        """In a chain of jobs, wait until this node sees the manifest of a stage that has succeeded. The client of a
        network file system may remember for a while that a file was missing."""
        until = time.monotonic() + NETWORK_S * bool(this_job().chain)
        while self.run.manifest(need) is None and time.monotonic() < until:
            time.sleep(1.0)
            with suppress(OSError):
                list(self.run.stage_folder(need).iterdir())  # makes the client ask its server again

    def _refuse_changed_ancestors(self) -> None:
        """UserError if a stage that this one needs, directly or not, does not match the current settings and files.

        A job that continues its submission does not stop because the corpus has grown since: nobody may be there to
        answer. It prints a warning.
        """
        run = self.run
        name = self.name
        for need in before([name]):
            changed = run.changed(need)
            settings = [change for change in changed if change.key.startswith("config.")]
            if refused := settings if continues(run, name) else changed:
                raise run.refusal(need, refused)
            if changed:
                say(name, f"warning: this job continues as it was submitted, although since then: "
                          f"{run.refusal(need, changed)}")
        if not this_job().chain:  # else the launcher has printed it
            for text in run.absences(before([name])):
                say(name, text)

    def _locked(self) -> int:
        """Do what the state of the stage requires. Returns the process's exit status."""
        run = self.run
        name = self.name
        element = self.options.element
        with ExitStack() as held:
            with turn(run.folder, name) if element else nullcontext():
                file, alone = lock_to_share(run.folder, name) if element else (lock(run.folder, name), True)
                held.enter_context(file)
                # Take shared locks, so that no input is rebuilt while this stage reads it.
                for need in self.stage.needs:
                    held.enter_context(lock(run.stage_folder(need).parent, need, shared=True))
                if not alone and forced(run, name, self.options):
                    raise in_use(run.folder, name, lock_holder(file))
                work = prepare(run, name, self.options) if alone else join(run, name, element)
                if element:
                    share(file, run.folder, name)
            if work is None:
                clear_done(run, name, locked=True)
                return 0
            if self.channel is not None:
                self.channel.broadcast(work)
            work.workers = self.workers
            if self.stage.workers:  # a stage with tasks reacts to requests to stop
                work.stop = StopRequest(work.config.launch.signal_s)
            return self._work(work)

    def _work(self, work: Work) -> int:
        """Do the work. Returns the process's exit status."""
        name = self.name
        try:
            with work.stop if self.stage.workers else nullcontext():
                self._do(work)
        except Stopped as stopped:
            work.note_stopped(stopped)
            if stopped.hopeless:
                complain(f"{name} stops here: {stopped.reason}.")
                return UserError.exit_status
            say(name, f"stopped ({stopped.reason}); the same command continues")
            return INTERRUPTED
        except Exception as error:
            if work.element and read_manifest(work.folder) is not None:  # it has removed what this process read
                say(name, "another process has finished it")
                clear_done(self.run, name, locked=True)
                return 0
            if isinstance(error, UnusableInputError):
                # Once the user has corrected the input, the stage may start from scratch without --force.
                change_start(work.folder, unusable=True)
            raise
        if read_manifest(work.folder) is not None:
            return 0
        if (state := read_state(work.folder, work.state_file)) is not None and state.status == "preempted":
            return INTERRUPTED
        reason = "its function returned without work.commit, which it must call at its end"
        with suppress(OSError):
            write_state(work.folder, "failed", work.state_file, reason=reason)
        complain(f"{name} stops here: {reason}.")
        return 1

    def _do(self, work: Work) -> None:
        """Do the work. If it fails because an input is damaged, raise the error about the input instead."""
        if self.channel is not None:
            work.command = sha256_json({**vars(self.options), "job": str(self.options.job)})
            work.store = self.channel.store
        try:
            self.body(work)
        except OSError:
            if work.element:
                with turn(work.run.folder, self.name):  # who commits the stage removes what others are writing
                    if (work.folder / MANIFEST).exists():
                        raise DoneElsewhere from None
            raise
        except DoneElsewhere:
            raise
        except Exception as error:
            try:
                work.refuse_changed_inputs()
            except UserError as damaged:
                raise damaged from error
            raise
        finally:
            for check in work.checks:
                check.close()


def _refuse_element(name: str, options: argparse.Namespace, with_tasks: bool) -> None:
    """UserError if this process cannot be one of several that share the stage."""
    if options.element and (options.force or not with_tasks
                            or not re.fullmatch("[A-Za-z0-9_.-]{1,100}", options.element)):
        shared = ", ".join(other for other, stage in STAGES.items() if stage.workers)
        raise UserError(f"{name} cannot be run with --element {options.element!r}: it takes a stage with tasks that "
                        f"processes share ({shared}), a name of letters, digits, _, - and dots, and --force-id in "
                        f"place of --force, by which each element would remove what the others did.")


def _reason(error: Exception) -> str | None:
    """The message of an error that the user can fix; None for a defect of Drover."""
    if isinstance(error, UserError):
        return str(error)
    if is_full_disk(error):
        return (f"the disk or quota is full ({error}). No half-written file counts as finished. Free some space and "
                f"run the same command again.")
    return None


def _is_followed(run: Run, name: str) -> bool:
    """Whether a failure is recorded. A stage that was refused before its start gets no folder for this, except in a
    job, whose launcher waits for the reason. A reused stage records nothing about this run."""
    with suppress(UserError):
        return (run.own_folder(name).is_dir() or bool(this_job().chain)) and not run.is_reused(name)
    return False


def is_leader() -> bool:
    """Whether this process writes for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def forced(run: Run, name: str, options: argparse.Namespace) -> bool:
    """Whether to start the stage from scratch: with `--force`, or with a `--force-id` that is new to the stage."""
    again = options.force_id is not None and start_or_empty(run.own_folder(name)).force_id != options.force_id
    return options.force or again


def prepare(run: Run, name: str, options: argparse.Namespace) -> Work | None:
    """Decide what to do about the stage. Returns its work; None if there is nothing to do."""
    if forced(run, name, options):
        return _start_from_scratch(run, name, options)
    state = run.state(name)
    if state.kind == "done":
        report_done(run, name)
        return None
    if state.kind == "changed" and not (options.accept_changes and acceptable(name, state.differences)):
        raise run.refusal(name, state.differences)
    if state.differences and (state.kind == "absent" or (state.kind == "changed" and not STAGES[name].checkpoints)):
        lost = "nothing is saved yet" if STAGES[name].checkpoints else (
            f"finished tasks that are removed: {finished_tasks(run.own_folder(name)):,}")
        say(name, f"settings or input have changed: {first(in_words(state.differences))}. It starts from scratch; "
                  f"{lost}")
        return _start_from_scratch(run, name, options)
    record = run.record(name)
    accepted = list(record.accepted) if record is not None else []
    if state.kind == "changed":
        accepted += map(str, state.differences)
        if isinstance(record, Manifest) and run.has_ended:
            _accept(run, name, replace(record, accepted=accepted))
            return None
    fingerprint = run.fingerprint(name)  # refuses missing files before the manifest is removed
    for difference in state.differences:
        say(name, f"changed: {difference}")
    if any(OTHER_FILES in reason for reason in state.reasons):
        say(name, f"{OTHER_FILES}; these files are read again")
    if isinstance(record, Manifest):
        missing = record.missing_outputs(run.stage_folder(name))
        if missing and run.is_reused(name):
            raise UserError(f"The reused stage {name} is damaged: {'; '.join(missing[:5])}. Repair that run first: "
                            f"run its stage {name} again.")
        for problem in missing[:5]:
            say(name, f"damaged: {problem}; making it again")
        if missing or state.differences:
            _withdraw(run, name)
    return begin(run, name, fingerprint, accepted, options.element, options.force_id)


def _start_from_scratch(run: Run, name: str, options: argparse.Namespace) -> Work:
    listed_files(STAGES[name].input_files(run.config))  # refuses missing files before the outputs are removed
    keep = STAGES[name].checkpoints
    if (aside := set_aside(run.own_folder(name), keep=keep)) is not None:
        say(name, f"the old outputs are kept in {aside}")
    _outdate_report(run, name)
    run.forget_files()  # the recorded hashes were removed with the outputs: hash the current files
    work = begin(run, name, run.fingerprint(name), [], options.element, options.force_id)
    work.from_scratch = True
    return work


def report_done(run: Run, name: str) -> None:
    """Print that the stage is up to date, and a warning if its code has changed."""
    origin = f", reused from {run.stage_folder(name)}" if run.is_reused(name) else ""
    say(name, f"up to date{origin}")
    if changed := run.changed_code(name):
        say(name, f"warning: the code has changed since ({first(changed)}); --force rebuilds it")


def clear_done(run: Run, name: str, *, locked: bool) -> None:
    """Remove what a kill or a refusal left in the folder of a finished stage."""
    folder = run.own_folder(name)
    manifest = run.manifest(name)
    if run.is_reused(name) or manifest is None or not os.access(folder, os.W_OK) or not left_files(folder, manifest):
        return
    with suppress(UserError, OSError):  # another process may rebuild it now, or it belongs to another user
        held = None if locked else lock(run.folder, name, shared=True)
        if read_manifest(folder) is not None and (removed := clear(folder, manifest)):
            say(name, f"removed what was left behind when it was committed: {', '.join(removed)}")
        del held


def _withdraw(run: Run, name: str) -> None:
    """Make a finished stage unfinished; its outputs stay."""
    restore_start(run.own_folder(name))
    for record in (MANIFEST, STATE, PROGRESS):
        (run.own_folder(name) / record).unlink(missing_ok=True)
    _outdate_report(run, name)


def _accept(run: Run, name: str, manifest: Manifest) -> None:
    """Keep a finished stage although its settings or inputs have changed; the manifest takes the present ones."""
    identity = run.fingerprint(name)
    replace(manifest, fingerprint=identity, files=run.files(name), places=places(STAGES[name], run.config)).write(
        run.own_folder(name))
    say(name, "kept as it is, although these have changed:")
    for difference in manifest.accepted:
        say(name, f"  {difference}")
    _outdate_report(run, name)


def _outdate_report(run: Run, name: str) -> None:
    """Have the report made again, since it shows more of a stage than its outputs."""
    manifest = run.own_folder("report") / MANIFEST
    if name in before(["report"]) and manifest.exists():
        manifest.unlink(missing_ok=True)
        say(name, "report.html shows the run as it was before; the stage report makes it again")
