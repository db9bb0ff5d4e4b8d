"""What every `python -m pipeline.<stage>` does around its stage: arguments, state, refusal, commit, errors."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NoReturn

from pipeline.config.loading import load_config
from pipeline.console import say
from pipeline.errors import UserError, is_full_disk
from pipeline.manifest import MANIFEST, read_manifest
from pipeline.orphans import end_with_parent
from pipeline.run import Run, State
from pipeline.stages import STAGES, before
from pipeline.work import Work, begin, lock, mark_failed, set_aside

INTERRUPTED = 130
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
        if isinstance(error, UserError):
            text, status = str(error), error.exit_status
        elif is_full_disk(error):
            text, status = (f"the disk or quota is full ({error}). Nothing half-written is kept as finished. Free some "
                            f"space and run the same command again."), UserError.exit_status
        else:
            raise
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
    result.add_argument("--force", action="store_true",
                        help="rebuild the stage (training output is set aside, never deleted)")
    result.add_argument("--accept-drift", action="store_true",
                        help="go on although inputs or settings changed; recorded in every later manifest")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file")
    return result


def is_leader() -> bool:
    """Whether this process writes for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def _run(name: str, body: Callable[[Work], None], options: argparse.Namespace) -> int:
    run = Run(load_config(options.config, options.overrides))
    for need in STAGES[name].needs:
        run.finished(need)  # refuses before anything is touched
    run.refuse_stale_inputs(name)
    if not options.force and run.state(name).kind == "done":
        _report_done(run, name)  # without a lock: others may be reading it
        return 0
    # Only the leader locks: the other ranks were started with it and read the same folder.
    held = _locks(run, name) if is_leader() else []
    work = _prepare(run, name, options)
    if work is None:
        return 0
    try:
        body(work)
    except UserError:
        if is_leader():
            mark_failed(work)
        raise
    del held
    return 0 if not is_leader() or read_manifest(work.folder) is not None else INTERRUPTED


def _locks(run: Run, name: str) -> list[IO[str] | None]:
    """Write this stage alone, and let nobody rebuild those that it reads."""
    own = lock(run.folder, name)
    reading = [lock(run.stage_folder(need).parent, need, shared=True) for need in STAGES[name].needs]
    return [own, *reading]


def _prepare(run: Run, name: str, options: argparse.Namespace) -> Work | None:
    """Decide what the state of the stage allows; None if nothing is to be done."""
    if options.force:
        return _start_afresh(run, name)
    state, fingerprint = run.state(name), run.fingerprint(name)
    if state.kind == "to do" and state.differences:
        return _start_afresh(run, name)
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
    return begin(run, name, fingerprint, drift)


def _start_afresh(run: Run, name: str) -> Work:
    if not is_leader():
        return Work(run, name, run.fingerprint(name))
    aside = set_aside(run.own_folder(name), keep=name == "train")
    if aside is not None:
        say(name, f"the old outputs are kept in {aside}")
    return begin(run, name, run.fingerprint(name), [])


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
        (run.own_folder(name) / MANIFEST).unlink(missing_ok=True)


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
