"""What every `python -m pipeline.<stage>` does around its stage: arguments, state, refusal, commit, errors."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from typing import NoReturn

from drover.pipeline.config.loading import load_config
from drover.pipeline.config.outside import absent_packages
from drover.pipeline.config.places import blocked, make_folder
from drover.pipeline.contract.locks import NETWORK_S, StageLock, lock
from drover.pipeline.contract.manifest import MANIFEST, read_manifest
from drover.pipeline.contract.preparation import forced, is_leader, prepare, report_done, tell_changed_files
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stage_work import Work, processes
from drover.pipeline.contract.stages import STAGES, Stage, before
from drover.pipeline.contract.start_record import change_start, sound_start
from drover.pipeline.contract.state import STATE, read_state, write_state
from drover.pipeline.contract.stopping import Stopped, StopRequest
from drover.pipeline.contract.tasks import Part, ShareDone
from drover.pipeline.contract.telling import Channel, Ended, asked
from drover.pipeline.contract.workers import Workers
from drover.pipeline.core.command_line import INTERRUPTED, Parser, complain
from drover.pipeline.core.console import say
from drover.pipeline.core.errors import UnusableInputError, UserError, is_full_disk, listed
from drover.pipeline.core.orphans import end_with_parent

SILENCE_S = 3.0
"""How long a rank other than 0 keeps its error to itself."""


def stage_main(name: str, body: Callable[[Work], None], arguments: list[str] | None = None) -> int:
    """Run the stage `name` if it is not done; the process's exit status.

    `body(work)` does the work and calls `work.commit`. Every rank of a stage that has ranks runs this; rank 0 alone
    writes. A stage that leaves its body without a commit was asked to stop and will be continued.
    """
    options = parser(name).parse_intermixed_args(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())  # the elastic agent's workers are in sessions of their own and would outlive it
    try:
        return StageAttempt(name, body, options)()
    except Exception as error:
        # Only texts are kept: an error holds on to its frames, and so to the lock.
        if (text := _reason(error)) is None:
            raise
        status = error.exit_status if isinstance(error, UserError) else UserError.exit_status
        if not is_leader():
            # Most often every rank says the same, and rank 0 says it for all: its end takes this rank along while it
            # waits. What this rank alone knows must be heard, though.
            time.sleep(SILENCE_S)
        complain(f"{name} stops here{'' if is_leader() else ' on rank ' + os.environ['RANK']}: {text}")
        return status
    except KeyboardInterrupt:
        say(name, "stopped; the same command continues")
        return INTERRUPTED


def end_process(status: int) -> NoReturn:
    """End a rank's process with `status`, at once.

    Not by tearing the interpreter down: while that happens, threads of process groups abort the process now and then
    ("terminate called without an active exception"), and a rank that has done all its work would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def parser(name: str) -> Parser:
    """The command line that all stages share."""
    result = Parser(prog=f"python -m drover.pipeline.{name}", description=f"Run the stage {name} of a run.")
    result.add_argument("--config", required=True, help="YAML file of the run")
    forcing = result.add_mutually_exclusive_group()
    forcing.add_argument("--force", action="store_true",
                         help="rebuild the stage (training output is set aside, never deleted)")
    forcing.add_argument("--force-id", metavar="ID",
                         help="like --force, but only once for this ID: called with it again, the stage goes on")
    result.add_argument("--part", metavar="I/N",
                        help="do only part I, from 0, of N of the stage's units; others may do the other parts at the "
                             "same time, and the stage run without --part finishes it")
    result.add_argument("--phase", metavar="NAME",
                        help="of which phase --part does its share: the one before must be done (default: the first)")
    result.add_argument("--accept-drift", action="store_true",
                        help="go on although inputs or settings changed; recorded in every later manifest")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file")
    return result


def continues(run: Run, name: str) -> bool:
    """Whether this job goes on with what the same submission has begun, or measures what it made so far."""
    chain = os.environ.get("DROVER_CHAIN")
    return "DROVER_CONTINUES" in os.environ or (chain is not None and sound_start(run.own_folder(name)).chain == chain)


class StageAttempt:
    """One attempt at a stage, by one process: of several ranks, rank 0 decides what there is to do (`lead`) and tells
    the others, who do it (`follow`).

    Attributes:
        name, body, options: what is to be done, and the command line.
        channel: the way to the other ranks; None where there are none.
        run: as this process reads it. part: the share of a phase that was asked for. workers: processes for units.
    """

    def __init__(self, name: str, body: Callable[[Work], None], options: argparse.Namespace) -> None:
        self.name, self.body, self.options = name, body, options
        self.channel = Channel.here()

    @property
    def stage(self) -> Stage:
        """The stage; one that a plugin registers is known once the configuration is loaded."""
        return STAGES[self.name]

    def __call__(self) -> int:
        """Do what there is to do; the process's exit status."""
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
        """Do what rank 0 says."""
        try:
            work = channel.listen(self.name, lambda: load_config(
                self.options.config, self.options.overrides, check=False).plugins)
        except RuntimeError:
            say(self.name, f"rank 0 ended before it told rank {channel.rank} what to do")
            return 1
        if isinstance(work, Ended):
            if work.status:
                time.sleep(SILENCE_S)  # rank 0 is to end first, with its reason
            return work.status
        self._do(work)
        return 0

    def lead(self) -> int:
        """Look what there is to do, and do it with the others."""
        self.run = Run(load_config(self.options.config, self.options.overrides))
        self.part = _part(self.name, self.options)
        if (obstacle := blocked(self.run.folder)) is not None:
            raise UserError(obstacle)
        if not (self.run.own_folder(self.name) / MANIFEST).exists():  # else there is most likely nothing to do
            for module in self.stage.unit_modules:
                importlib.import_module(module)
        # A plugin's may have units too.
        with_workers = self.stage.workers or (self.stage.own_module and not self.stage.ranks)
        with closing(Workers(processes(self.run.config) if with_workers else 1)) as self.workers:
            if self._is_done():
                report_done(self.run, self.name)  # without a lock: others may be reading it
                _note_done(self.run, self.name, locked=False)
                return 0
            make_folder(self.run.folder)
            held = StageLock(self.run.folder, self.name, self.part)
            try:
                return self._locked(held)
            except (Exception, KeyboardInterrupt) as error:
                if self.part is None:
                    _note_end(self.run, self.name, error)
                raise
            finally:
                held.release()

    def _is_done(self) -> bool:
        """Whether the stage is up to date; UserError where what it is made of, or a package, is not there."""
        run, name = self.run, self.name
        try:
            for need in self.stage.needs:
                self._await_manifest(need)
                run.finished(need)  # refuses before anything is touched
            self._refuse_stale_inputs()
            # A part looks no further without a manifest: one of them, which starts the stage, hashes the files for all.
            done = (not forced(run, name, self.options) and (self.part is None or run.manifest(name) is not None)
                    and run.state(name).kind == "done")
            if not done and (problems := absent_packages(run.config, name)):
                raise UserError(listed(problems))
            return done
        except UserError as error:
            if self.part is None:
                with suppress(UserError, OSError):  # another process has it: then that one tells how it stands
                    other = lock(run.folder, name) if _is_followed(run, name) else None
                    _note_end(run, name, error)
                    del other
            raise

    def _await_manifest(self, need: str) -> None:
        """In a chain of jobs the stage before has ended well; on a network file system this node may see it a while
        later, as long as it remembers that there was no manifest."""
        until = time.monotonic() + NETWORK_S * ("DROVER_CHAIN" in os.environ)
        while self.run.manifest(need) is None and time.monotonic() < until:
            time.sleep(1.0)
            with suppress(OSError):
                list(self.run.stage_folder(need).iterdir())  # makes the client look again

    def _refuse_stale_inputs(self) -> None:
        """UserError if a stage that this one is made of is not what is asked for now.

        A job that goes on with what its submission began, when nobody is there to answer, is not stopped by a corpus
        that has grown since: this is said.
        """
        run, name = self.run, self.name
        try:
            run.refuse_stale_inputs(name)
        except UserError as error:
            if not continues(run, name):
                raise
            run.refuse_stale_inputs(name, files=False)
            say(name, f"warning: it goes on as it was submitted, although since then: {error}")
            return
        if "DROVER_LAUNCHED" not in os.environ:  # the launcher has said it
            for text in run.absences(before([name])):
                say(name, text)

    def _locked(self, held: StageLock) -> int:
        """Do what the state of the stage asks for; the process's exit status."""
        run, name, part = self.run, self.name, self.part
        # Nobody rebuilds what is read here.
        reading = [lock(run.stage_folder(need).parent, need, shared=True) for need in self.stage.needs]
        if part and not forced(run, name, self.options) and run.state(name).kind == "partial":
            tell_changed_files(run, name)
            work: Work | None = Work(run, name, run.fingerprint(name), run.begun_drift(name), part)
            change_start(run.own_folder(name), failed=False, unusable=False)  # it goes on with what was refused
        else:
            held.alone()
            work = prepare(run, name, self.options, part)
        held.begun()
        if work is None:
            _note_done(run, name, locked=True)
            return 0
        if self.channel is not None:
            self.channel.tell(work)
        work.workers = self.workers
        if self.stage.workers:  # what is done in units hears what asks it to stop
            work.stop = StopRequest(work.config.launch.signal_s)
        try:
            with work.stop if self.stage.workers else nullcontext():
                self._do(work)
        except ShareDone:
            return 0
        except Stopped as stopped:
            work.note_stopped(stopped)
            if stopped.hopeless:
                complain(f"{name} stops here: {stopped.reason}.")
                return UserError.exit_status
            say(name, f"stopped ({stopped.reason}); the same command continues")
            return INTERRUPTED
        except UserError as error:
            # When what was refused is corrected it may start afresh without --force: as long as it has no finished
            # units, or also with some that are no use. A part never says so of what the other parts have made.
            change_start(work.folder, failed=True, unusable=part is None and isinstance(error, UnusableInputError))
            raise
        del reading
        return 0 if read_manifest(work.folder) is not None else INTERRUPTED

    def _do(self, work: Work) -> None:
        """Do the work; where it fails because an input is damaged, that is what is told."""
        if self.channel is not None:
            work.asked, work.store = asked(vars(self.options)), self.channel.store
        try:
            self.body(work)
        except (ShareDone, OSError):
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


def _part(name: str, options: argparse.Namespace) -> Part | None:
    phases = STAGES[name].phases
    if options.part is None:
        if options.phase is not None:
            raise UserError("--phase says of which phase --part does its share. Give --part I/N with it, or neither.")
        return None
    part = Part.parse(options.part, options.phase or next(iter(phases), ""))
    if not phases:
        in_parts = ", ".join(other for other, stage in STAGES.items() if stage.phases)
        raise UserError(f"The stage {name} cannot be done in parts; {in_parts} can. Run it without --part.")
    if part.phase not in phases:
        raise UserError(f"The stage {name} has no phase {part.phase} to share out. Give --phase one of "
                        f"{', '.join(phases)}.")
    if options.force:
        raise UserError("Each part with --force would throw away what the others did. Give all of them, and the call "
                        "that finishes the stage, the same --force-id instead: only the first then starts it afresh.")
    return part


def _reason(error: Exception) -> str | None:
    """What a user is told of an error that he can mend; None for a defect of ours."""
    if isinstance(error, UserError):
        return str(error)
    if is_full_disk(error):
        return (f"the disk or quota is full ({error}). Nothing half-written is kept as finished. Free some space and "
                f"run the same command again.")
    return None


def _note_end(run: Run, name: str, error: BaseException) -> None:
    """Record why the stage ended; of Ctrl-C, unless the stage itself has said how."""
    folder = run.own_folder(name)
    with suppress(OSError):  # the disk may be full; then the last word is that the stage was running
        if not isinstance(error, Exception):
            if (state := read_state(folder)) is not None and state.status == "running":
                write_state(folder, "preempted", reason="interrupted")
        elif (reason := _reason(error)) is not None and _is_followed(run, name):
            write_state(folder, "failed", reason=reason)


def _is_followed(run: Run, name: str) -> bool:
    """Whether a failure has a place to be recorded in: what was refused before it began makes none by itself, except
    for a job, whose launcher waits for the reason. What is reused tells nothing of this run."""
    with suppress(UserError):
        return (run.own_folder(name).is_dir() or "DROVER_CHAIN" in os.environ) and not run.is_reused(name)
    return False


def _note_done(run: Run, name: str, *, locked: bool) -> None:
    """Set right what a kill or a refusal left of a finished stage: files that were to go, and another last word."""
    folder, manifest = run.own_folder(name), run.manifest(name)
    state = read_state(folder)
    if run.is_reused(name) or manifest is None or not os.access(folder, os.W_OK) or (
            not manifest.left_scratch(folder) and state is not None and state.status == "done"):
        return
    with suppress(UserError, OSError):  # somebody rebuilds it by now; or it is another user's
        held = None if locked else lock(run.folder, name, shared=True)
        if read_manifest(folder) is not None:
            if removed := manifest.remove_scratch(folder):
                say(name, f"removed what was left behind when it was committed: {', '.join(removed)}")
            for killed in folder.glob(f"{STATE}.*.tmp"):  # in the middle of its last word, after the commit
                killed.unlink(missing_ok=True)
            write_state(folder, "done", step=manifest.counts.get("steps"))
        del held
