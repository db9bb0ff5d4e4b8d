"""Decide from the state of a stage whether to start it, continue, keep its outputs, rebuild it or refuse."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress

from drover.pipeline.config.shapes import POSITIONS
from drover.pipeline.contract.external_inputs import listed_files
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.manifest import MANIFEST, Drifts, Identity, read_manifest
from drover.pipeline.contract.run import Run, State
from drover.pipeline.contract.stage_work import Work, begin, set_aside
from drover.pipeline.contract.stages import STAGES, before
from drover.pipeline.contract.start_record import restore_start, sound_start
from drover.pipeline.contract.state import PROGRESS, STATE, read_state, write_state
from drover.pipeline.contract.tasks import Part, finished_units
from drover.pipeline.core.console import first, say
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record

MAY_CHANGE = tuple(f"config.model.{name}" for name in POSITIONS)
"""Settings that may change under a checkpoint: its weights and optimizer state stay valid."""


def is_leader() -> bool:
    """Whether this process writes for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def forced(run: Run, name: str, options: argparse.Namespace) -> bool:
    """Whether to start the stage from scratch: with `--force`, or with a `--force-id` that is new to the stage."""
    again = options.force_id is not None and sound_start(run.own_folder(name)).force_id != options.force_id
    return options.force or again


def prepare(run: Run, name: str, options: argparse.Namespace, part: Part | None) -> Work | None:
    """Decide what to do about the stage. Returns its work; None if there is nothing to do."""
    if forced(run, name, options):
        return _start_from_scratch(run, name, options, part)
    state = run.state(name)
    if state.kind == "to do" and state.differences and "renews" not in STAGES[name].functions:
        _tell_lost_units(run, name, state)
        return _start_from_scratch(run, name, options, part)
    drift: Drifts = _earlier_drift(run, name) if state.kind == "partial" else []
    if state.kind == "done":
        report_done(run, name)
        return None
    if state.kind == "stale":
        if not options.accept_drift or run.is_reused(name):
            raise run.refusal(name, state)
        if _input_rebuilt_now(run, name, state):
            _tell_lost_units(run, name, state)
            return _start_from_scratch(run, name, options, part)
        accepted = {"stage": name, "differences": [str(difference) for difference in state.differences]}
        if not state.begun_only and not STAGES[name].goes_on(run.config, run.finished(name).counts):
            _accept(run, name, run.fingerprint_of_finished(name), accepted)
            return None
        _refuse_mixing(run, name, state)
        drift = [*_earlier_drift(run, name), accepted]
    fingerprint = run.fingerprint(name)  # refuses missing files before the manifest is removed
    if state.kind == "partial":
        tell_changed_files(run, name)
    if state.kind == "partial" and state.differences:
        _renew(run, name, state)
    if state.kind == "stale":
        _withdraw(run, name)
    if state.kind == "damaged":
        _repair(run, name, state)
    return begin(run, name, fingerprint, drift, part, options.force_id)


def _input_rebuilt_now(run: Run, name: str, state: State) -> bool:
    """Whether an input of a stale stage has changed because this very command rebuilt it: nobody has accepted that. A
    stage with checkpoints continues with it."""
    chain, changed = os.environ.get("DROVER_CHAIN"), {difference.key for difference in state.differences}
    return chain is not None and not STAGES[name].checkpoints and any(
        f"inputs.{need}" in changed and sound_start(run.stage_folder(need)).chain == chain
        for need in STAGES[name].needs)


def _tell_lost_units(run: Run, name: str, state: State) -> None:
    """Print how many finished units are lost because settings or input have changed."""
    if (units := finished_units(run.own_folder(name))):
        say(name, f"settings or input have changed: {first([str(difference) for difference in state.differences])}. It "
                  f"starts from scratch; finished units that are removed: {units:,}")


def _start_from_scratch(run: Run, name: str, options: argparse.Namespace, part: Part | None) -> Work:
    listed_files(STAGES[name].input_files(run.config))  # refuses missing files before the outputs are removed
    keep = STAGES[name].checkpoints
    if (aside := set_aside(run.own_folder(name), keep=keep)) is not None:
        say(name, f"the old outputs are kept in {aside}")
    if name in before(["report"]):
        (run.own_folder("report") / MANIFEST).unlink(missing_ok=True)  # it shows more than the outputs
    run.forget_files()  # the recorded hashes were removed with the outputs: hash the current files
    work = begin(run, name, run.fingerprint(name), [], part, options.force_id)
    work.afresh = True
    return work


def _renew(run: Run, name: str, state: State) -> None:
    """Print what has changed for a finished stage that may take another fingerprint, and have the report made again."""
    for difference in state.differences:
        say(name, f"changed: {difference}")
    _withdraw(run, name)
    if name in before(["report"]):
        set_aside(run.own_folder("report"), keep=False)


def tell_changed_files(run: Run, name: str) -> None:
    """For a stage that continues, print that files of its units have changed since its start."""
    if (changed := run.files_changed_since_begun(name)):
        say(name, f"{changed}; these files are read again")


def report_done(run: Run, name: str) -> None:
    """Print that the stage is up to date, and a warning if its code has changed."""
    origin = f", reused from {run.stage_folder(name)}" if run.is_reused(name) else ""
    say(name, f"up to date{origin}")
    if changed := run.changed_code(name):
        say(name, f"warning: the code has changed since ({first(changed)}); --force rebuilds it")


def note_done(run: Run, name: str, *, locked: bool) -> None:
    """Complete a finished stage after a kill or a refusal: remove its scratch files and write its final status."""
    folder, manifest = run.own_folder(name), run.manifest(name)
    state = read_state(folder)
    killed = [*folder.glob(f"{STATE}.*.tmp")]  # of a process killed while it wrote its final status
    if run.is_reused(name) or manifest is None or not os.access(folder, os.W_OK) or (
            not manifest.left_scratch(folder) and not killed and state is not None and state.status == "done"):
        return
    with suppress(UserError, OSError):  # another process may rebuild it now, or it belongs to another user
        held = None if locked else lock(run.folder, name, shared=True)
        if read_manifest(folder) is not None:
            if removed := manifest.remove_scratch(folder):
                say(name, f"removed what was left behind when it was committed: {', '.join(removed)}")
            for path in killed:
                path.unlink(missing_ok=True)
            write_state(folder, "done", step=manifest.counts.get("steps"))
        del held


def _refuse_mixing(run: Run, name: str, state: State) -> None:
    """UserError unless the stage has checkpoints of the same network: then it may continue with other settings."""
    if not STAGES[name].checkpoints:
        raise UserError(f"{name} was started with the old settings and is not finished, and outputs of two settings "
                        f"must not be mixed in one stage. Use --force to start from scratch.\n"
                        f"{run.refusal(name, state)}")
    shape = [str(difference) for difference in state.differences
             if difference.key.startswith("config.model.") and not difference.key.startswith(MAY_CHANGE)]
    if shape:
        raise UserError(f"A checkpoint cannot continue as another network: {'; '.join(shape)}. Use --force to start "
                        f"from scratch, or name=<another>. (To extend the context, only {', '.join(POSITIONS)} may "
                        f"change.)")


def _earlier_drift(run: Run, name: str) -> Drifts:
    manifest = run.manifest(name)
    return [entry for entry in manifest.drift if entry["stage"] == name] if manifest else run.begun_drift(name)


def _withdraw(run: Run, name: str) -> None:
    """Make a finished stage unfinished; its outputs stay."""
    restore_start(run.own_folder(name))
    for record in (MANIFEST, STATE, PROGRESS):
        (run.own_folder(name) / record).unlink(missing_ok=True)


def _accept(run: Run, name: str, fingerprint: Identity, accepted: Record) -> None:
    """Accept a finished stage although its settings or inputs have changed, and record the changes in its manifest."""
    manifest = run.finished(name)
    manifest.drift.append(accepted)
    manifest.accepted.append(fingerprint)
    manifest.write(run.stage_folder(name))
    say(name, "accepted as it is, in spite of these changes:")
    for difference in accepted["differences"]:
        say(name, f"  {difference}")
    for later in STAGES:
        made = read_manifest(run.own_folder(later)) if name in before([later]) else None
        if made is not None:
            made.drift.append(accepted)
            made.write(run.own_folder(later))
    if name in before(["report"]):
        (run.own_folder("report") / MANIFEST).unlink(missing_ok=True)  # it is made again, to show the changes


def _repair(run: Run, name: str, state: State) -> None:
    """Remove the manifest of a finished stage that lost an output, so that it is made again."""
    if run.is_reused(name):
        raise UserError(f"The reused stage {name} is damaged: {'; '.join(state.reasons[:5])}. Repair that run first: "
                        f"run its stage {name} again.")
    for reason in state.reasons[:5]:
        say(name, f"damaged: {reason}; making it again")
    _withdraw(run, name)
