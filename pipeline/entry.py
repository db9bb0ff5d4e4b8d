"""What every `python -m pipeline.<stage>` does around its stage: arguments, state, refusal, commit, errors."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from pipeline.config.loading import load_config
from pipeline.console import say
from pipeline.errors import UserError, is_full_disk
from pipeline.locks import StageLock, lock
from pipeline.manifest import MANIFEST, read_manifest
from pipeline.orphans import end_with_parent
from pipeline.parts import Part, ShareDone
from pipeline.run import Run, State, force_id
from pipeline.stages import STAGES, before
from pipeline.state import STATE, read_state, write_state
from pipeline.work import Work, begin, mark_failed, set_aside

INTERRUPTED = 130
NETWORK_S = 75.0
"""Longer than network file systems remember by default that a file was not there."""
SILENCE_S = 3.0
"""How long a rank other than 0 keeps its error to itself."""


def stage_main(name: str, body: Callable[[Work], None], arguments: list[str] | None = None) -> int:
    """Run the stage `name` if it is not done; the process's exit status.

    `body(work)` does the work and calls `work.commit`. Under the elastic agent every rank runs this; rank 0 alone
    writes. A stage that leaves its body without a commit was asked to stop and will be continued.
    """
    options = parser(name).parse_intermixed_args(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())  # the elastic agent's workers are in sessions of their own and would outlive it
    try:
        return _run(name, body, options)
    except Exception as error:
        # Only texts are kept: an error holds on to its frames, and so to the lock.
        if (text := _reason(error)) is None:
            raise
        status = error.exit_status if isinstance(error, UserError) else UserError.exit_status
        if not is_leader():
            # Most often every rank says the same, and rank 0 says it for all: its end takes this rank along while it
            # waits. What this rank alone knows must be heard, though.
            time.sleep(SILENCE_S)
        print(f"\n{name} stops here{'' if is_leader() else ' on rank ' + os.environ['RANK']}: {text}",
              file=sys.stderr, flush=True)
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


def parser(name: str) -> argparse.ArgumentParser:
    """The command line that all stages share."""
    result = argparse.ArgumentParser(prog=f"python -m pipeline.{name}", description=f"Run the stage {name} of a run.")
    result.add_argument("--config", required=True, help="YAML file of the run")
    forcing = result.add_mutually_exclusive_group()
    forcing.add_argument("--force", action="store_true",
                         help="rebuild the stage (training output is set aside, never deleted)")
    forcing.add_argument("--force-id", metavar="ID",
                         help="like --force, but only once for this ID: called with it again, the stage goes on")
    result.add_argument("--part", metavar="I/N",
                        help="do only part I, from 0, of N of the stage's units; others may do the other parts at the "
                             "same time, and the stage run without --part finishes it")
    result.add_argument("--accept-drift", action="store_true",
                        help="go on although inputs or settings changed; recorded in every later manifest")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file")
    return result


def _await_manifest(run: Run, need: str) -> None:
    """In a chain of jobs the stage before has ended well; on a network file system this node may see it a while later,
    as long as it remembers that there was no manifest."""
    until = time.monotonic() + NETWORK_S * ("DROVER_CHAIN" in os.environ)
    while run.manifest(need) is None and time.monotonic() < until:
        time.sleep(1.0)
        with suppress(OSError):
            list(run.stage_folder(need).iterdir())  # makes the client look again


def is_leader() -> bool:
    """Whether this process writes for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def _run(name: str, body: Callable[[Work], None], options: argparse.Namespace) -> int:
    run = Run(load_config(options.config, options.overrides))
    part = _part(name, options)
    writes_state = is_leader() and part is None
    try:
        for need in STAGES[name].needs:
            _await_manifest(run, need)
            run.finished(need)  # refuses before anything is touched
        run.refuse_stale_inputs(name)
        # A part looks no further without a manifest: one of them, which starts the stage, hashes the files for all.
        done = (not _forced(run, name, options) and (part is None or run.manifest(name) is not None)
                and run.state(name).kind == "done")
    except UserError as error:
        if writes_state:
            _note_refusal(run, name, str(error))
        raise
    if done:
        _report_done(run, name)  # without a lock: others may be reading it
        if writes_state:
            with suppress(UserError):  # somebody rebuilds it by now
                _note_done(run, name, locked=False)
        return 0
    # Only the leader locks: the other ranks were started with it and read the same folder.
    held = StageLock(run.folder, name, part) if is_leader() else None
    try:
        return _locked(run, name, body, options, held)
    except Exception as error:
        if writes_state and (reason := _reason(error)) is not None:
            _note_failure(run, name, reason)
        raise
    except KeyboardInterrupt:
        if writes_state:
            _note_interrupt(run, name)
        raise


def _locked(run: Run, name: str, body: Callable[[Work], None], options: argparse.Namespace,
            held: StageLock | None) -> int:
    """Do what the state of the stage asks for; the process's exit status."""
    part = held.part if held else None
    # Nobody rebuilds what is read here.
    reading = [lock(run.stage_folder(need).parent, need, shared=True) for need in STAGES[name].needs] if held else []
    if held and part and not _forced(run, name, options) and run.state(name).kind == "partial":
        work: Work | None = Work(run, name, run.fingerprint(name), run.begun_drift(name), part)
    else:
        if held:
            held.alone()
        work = _prepare(run, name, options, part)
    if held:
        held.begun()
    if work is None:
        if is_leader() and part is None:
            _note_done(run, name, locked=True)
        return 0
    try:
        body(work)
    except ShareDone:
        return 0
    except UserError:
        if is_leader():
            mark_failed(work)
        raise
    del reading
    return 0 if not is_leader() or read_manifest(work.folder) is not None else INTERRUPTED


def _part(name: str, options: argparse.Namespace) -> Part | None:
    if options.part is None:
        return None
    part = Part.parse(options.part)
    if not STAGES[name].parts:
        raise UserError(f"The stage {name} cannot be done in parts; {', '.join(_in_parts())} can. Run it without "
                        f"--part.")
    if options.force:
        raise UserError("Each part with --force would throw away what the others did. Give all of them, and the call "
                        "that finishes the stage, the same --force-id instead: only the first then starts it afresh.")
    return part


def _in_parts() -> list[str]:
    return [name for name, stage in STAGES.items() if stage.parts]


def _forced(run: Run, name: str, options: argparse.Namespace) -> bool:
    """Whether the stage is to be started afresh: the first time that this is asked under an ID."""
    again = options.force_id is not None and force_id(run.own_folder(name)) != options.force_id
    return options.force or again


def _reason(error: Exception) -> str | None:
    """What a user is told of an error that he can mend; None for a defect of ours."""
    if isinstance(error, UserError):
        return str(error)
    if is_full_disk(error):
        return (f"the disk or quota is full ({error}). Nothing half-written is kept as finished. Free some space and "
                f"run the same command again.")
    return None


def _note_refusal(run: Run, name: str, reason: str) -> None:
    """Record why the stage could not even start, unless another process has it: then that one tells how it stands."""
    if _is_followed(run, name):
        with suppress(UserError, OSError):
            held = lock(run.folder, name)
            _note_failure(run, name, reason)
            del held


def _note_failure(run: Run, name: str, reason: str) -> None:
    with suppress(UserError, OSError):  # the disk may be full; then the last word is that the stage was running
        if _is_followed(run, name) and not run.is_reused(name):
            write_state(run.own_folder(name), "failed", reason=reason)


def _is_followed(run: Run, name: str) -> bool:
    """Whether a failure has a place to be recorded in: what was refused before it began makes none by itself, except
    for a job, whose launcher waits for the reason."""
    return run.own_folder(name).is_dir() or "DROVER_CHAIN" in os.environ


def _note_interrupt(run: Run, name: str) -> None:
    """Record Ctrl-C, unless the stage itself has said how it ended."""
    state = read_state(run.own_folder(name))
    if state is not None and state.status == "running":
        with suppress(OSError):
            write_state(run.own_folder(name), "preempted", reason="interrupted")


def _note_done(run: Run, name: str, *, locked: bool) -> None:
    """Make the record of a finished stage say so: a kill, or a refusal, may have left another word."""
    folder = run.own_folder(name)
    if run.is_reused(name) or ((state := read_state(folder)) is not None and state.status == "done"):
        return
    held = None if locked else lock(run.folder, name, shared=True)
    if (manifest := read_manifest(folder)) is not None:
        with suppress(OSError):  # it may be another user's
            write_state(folder, "done", step=manifest.counts.get("steps"))
    del held


def _prepare(run: Run, name: str, options: argparse.Namespace, part: Part | None) -> Work | None:
    """Decide what the state of the stage allows; None if nothing is to be done."""
    if _forced(run, name, options):
        return _start_afresh(run, name, options, part)
    state, fingerprint = run.state(name), run.fingerprint(name)
    if state.kind == "to do" and state.differences:
        return _start_afresh(run, name, options, part)
    drift: list[dict[str, Any]] = run.begun_drift(name) if state.kind == "partial" else []
    if state.kind == "done":
        _report_done(run, name)
        return None
    if state.kind == "stale":
        if not options.accept_drift or run.is_reused(name):
            raise run.refusal(name, state)
        accepted = {"stage": name, "differences": [str(difference) for difference in state.differences]}
        if not state.begun_only and not _prolongs(run, name):
            _accept(run, name, fingerprint, accepted)
            return None
        _refuse_mixing(run, name, state)
        drift = [*_earlier_drift(run, name), accepted]
        _withdraw(run, name)
    if state.kind == "damaged":
        _mend(run, name, state)
    if not is_leader():
        return Work(run, name, fingerprint, drift)
    return begin(run, name, fingerprint, drift, part, options.force_id)


def _start_afresh(run: Run, name: str, options: argparse.Namespace, part: Part | None) -> Work:
    if not is_leader():
        return Work(run, name, run.fingerprint(name))
    aside = set_aside(run.own_folder(name), keep=name == "train")
    if aside is not None:
        say(name, f"the old outputs are kept in {aside}")
    return begin(run, name, run.fingerprint(name), [], part, options.force_id)


def _report_done(run: Run, name: str) -> None:
    if not is_leader():
        return
    origin = f", reused from {run.stage_folder(name)}" if run.is_reused(name) else ""
    say(name, f"up to date{origin}")
    if changed := run.changed_code(name):
        say(name, f"warning: made by other code than is here now ({', '.join(changed[:3])}"
                  f"{' ...' if len(changed) > 3 else ''}); --force rebuilds it")


def _refuse_mixing(run: Run, name: str, state: State) -> None:
    """Only training can go on under other settings, and not with another network."""
    if name != "train":
        raise UserError(f"{name} was only begun with the old settings, and outputs of two settings must not be "
                        f"mixed in one stage. Use --force to start it afresh.\n{run.refusal(name, state)}")
    shape = [str(difference) for difference in state.differences if difference.key.startswith("config.model.")]
    if shape:
        raise UserError(f"A checkpoint of one network cannot go on as another: {'; '.join(shape)}. Use --force to "
                        f"start again, or name=<another>.")


def _prolongs(run: Run, name: str) -> bool:
    """Whether a finished training run is asked for more steps than it has done: then it goes on."""
    manifest = run.manifest(name)
    return name == "train" and manifest is not None and run.config.train.steps > manifest.counts["steps"]


def _earlier_drift(run: Run, name: str) -> list[dict[str, Any]]:
    manifest = run.manifest(name)
    return [entry for entry in manifest.drift if entry["stage"] == name] if manifest else run.begun_drift(name)


def _withdraw(run: Run, name: str) -> None:
    """Make a finished stage an unfinished one; its outputs stay."""
    if is_leader():
        for record in (MANIFEST, STATE):
            (run.own_folder(name) / record).unlink(missing_ok=True)


def _accept(run: Run, name: str, fingerprint: dict[str, Any], accepted: dict[str, Any]) -> None:
    """Serve a finished stage although it was made of something else, and leave the trace in its manifest."""
    if not is_leader():
        return
    manifest = run.finished(name)
    manifest.drift.append(accepted)
    manifest.accepted.append(fingerprint)
    manifest.write(run.stage_folder(name))
    say(name, "accepted as it is, in spite of:")
    for difference in accepted["differences"]:
        say(name, f"  {difference}")
    for later in STAGES:
        made = read_manifest(run.own_folder(later)) if name in before([later]) else None
        if made is not None:
            made.drift.append(accepted)
            made.write(run.own_folder(later))
    if name in before(["report"]):
        (run.own_folder("report") / MANIFEST).unlink(missing_ok=True)  # it has to tell of this: it is made again


def _mend(run: Run, name: str, state: State) -> None:
    """A finished stage lost an output: withdraw its manifest, so that what is missing is made again."""
    if run.is_reused(name):
        raise UserError(f"The reused stage {name} is damaged: {'; '.join(state.reasons[:5])}. Mend that run first.")
    if is_leader():
        for reason in state.reasons[:5]:
            say(name, f"damaged: {reason}; making it again")
    _withdraw(run, name)
