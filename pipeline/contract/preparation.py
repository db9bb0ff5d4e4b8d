"""What the state of a stage allows: to begin it, to go on, to serve it as it is, to make it again, or to refuse."""

from __future__ import annotations

import argparse
import os
from typing import Any

from drover.pipeline.config.shapes import POSITIONS
from drover.pipeline.contract.manifest import MANIFEST, read_manifest
from drover.pipeline.contract.run import Run, State
from drover.pipeline.contract.stage_work import Work, begin, set_aside
from drover.pipeline.contract.stages import STAGES, before
from drover.pipeline.contract.start_record import sound_start
from drover.pipeline.contract.state import EVALUATIONS, PROGRESS, STATE
from drover.pipeline.contract.tasks import Part, finished_units
from drover.pipeline.core.console import first, say
from drover.pipeline.core.errors import UserError

MAY_CHANGE = tuple(f"config.model.{name}" for name in POSITIONS)
"""What another value of leaves a checkpoint's weights and moments what they are."""


def is_leader() -> bool:
    """Whether this process writes for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def forced(run: Run, name: str, options: argparse.Namespace) -> bool:
    """Whether the stage is to be started afresh: the first time that this is asked under an ID."""
    again = options.force_id is not None and sound_start(run.own_folder(name)).force_id != options.force_id
    return options.force or again


def prepare(run: Run, name: str, options: argparse.Namespace, part: Part | None) -> Work | None:
    """Decide what the state of the stage allows; None if nothing is to be done."""
    if forced(run, name, options):
        return _start_afresh(run, name, options, part)
    state = run.state(name)
    if state.kind == "to do" and state.differences and "renews" not in STAGES[name].functions:
        _tell_lost_units(run, name, state)
        return _start_afresh(run, name, options, part)
    drift: list[dict[str, Any]] = _earlier_drift(run, name) if state.kind == "partial" else []
    if state.kind == "done":
        report_done(run, name)
        return None
    if state.kind == "stale":
        if not options.accept_drift or run.is_reused(name):
            raise run.refusal(name, state)
        accepted = {"stage": name, "differences": [str(difference) for difference in state.differences]}
        if not state.begun_only and not _prolongs(run, name):
            _accept(run, name, run.fingerprint_of_finished(name), accepted)
            return None
        _refuse_mixing(run, name, state)
        drift = [*_earlier_drift(run, name), accepted]
    fingerprint = run.fingerprint(name)  # refuses absent files before anything is withdrawn
    if state.kind == "partial":
        tell_changed_files(run, name)
    if state.kind == "partial" and state.differences:
        _renew(run, name, state)
    if state.kind == "stale":
        _withdraw(run, name)
    if state.kind == "damaged":
        _mend(run, name, state)
    return begin(run, name, fingerprint, drift, part, options.force_id)


def _tell_lost_units(run: Run, name: str, state: State) -> None:
    """Say, of a stage that refused what it was given and is now asked for otherwise, what goes with that."""
    if (units := finished_units(run.own_folder(name))):
        say(name, f"could not use what it was given before, and is asked for otherwise now: "
                  f"{first([str(difference) for difference in state.differences])}. It starts afresh; finished units "
                  f"that are removed: {units:,}")


def _start_afresh(run: Run, name: str, options: argparse.Namespace, part: Part | None) -> Work:
    keep = STAGES[name].checkpoints
    # Evaluations first: they are of the checkpoints, and must not be taken for those of new ones after a kill here.
    for old in (*([run.folder / EVALUATIONS] if keep else []), run.own_folder(name)):
        if (aside := set_aside(old, keep=keep)) is not None:
            say(name, f"the old outputs are kept in {aside}")
    if name in before(["report"]):
        (run.own_folder("report") / MANIFEST).unlink(missing_ok=True)  # it tells of more than the outputs
    run.forget_files(name)  # hashes that were recorded went with the outputs: what is read now is what counts
    work = begin(run, name, run.fingerprint(name), [], part, options.force_id)
    work.afresh = True
    return work


def _renew(run: Run, name: str, state: State) -> None:
    """A finished stage is to be made with another fingerprint that it may take: say so, and let the report, which
    tells of it, be made again."""
    for difference in state.differences:
        say(name, f"changed: {difference}")
    _withdraw(run, name)
    if name in before(["report"]):
        set_aside(run.own_folder("report"), keep=False)


def tell_changed_files(run: Run, name: str) -> None:
    """Say, of a stage that goes on, which of the files that its units read have changed since it was begun."""
    if (changed := run.files_changed_since_begun(name)):
        say(name, f"{changed}; what was read of them is read again")


def report_done(run: Run, name: str) -> None:
    origin = f", reused from {run.stage_folder(name)}" if run.is_reused(name) else ""
    say(name, f"up to date{origin}")
    if changed := run.changed_code(name):
        say(name, f"warning: made by other code than is here now ({first(changed)}); --force rebuilds it")


def _refuse_mixing(run: Run, name: str, state: State) -> None:
    """Only from a checkpoint can a stage go on under other settings, and not with another network."""
    if not STAGES[name].checkpoints:
        raise UserError(f"{name} was only begun with the old settings, and outputs of two settings must not be "
                        f"mixed in one stage. Use --force to start it afresh.\n{run.refusal(name, state)}")
    shape = [str(difference) for difference in state.differences
             if difference.key.startswith("config.model.") and not difference.key.startswith(MAY_CHANGE)]
    if shape:
        raise UserError(f"A checkpoint of one network cannot go on as another: {'; '.join(shape)}. Use --force to "
                        f"start again, or name=<another>. (To extend the context, "
                        f"{', '.join(POSITIONS)} alone may change.)")


def _prolongs(run: Run, name: str) -> bool:
    """Whether a finished stage is asked for more than it has done: then it goes on."""
    manifest = run.manifest(name)
    return manifest is not None and STAGES[name].goes_on(run.config, manifest.counts)


def _earlier_drift(run: Run, name: str) -> list[dict[str, Any]]:
    manifest = run.manifest(name)
    return [entry for entry in manifest.drift if entry["stage"] == name] if manifest else run.begun_drift(name)


def _withdraw(run: Run, name: str) -> None:
    """Make a finished stage an unfinished one; its outputs stay."""
    for record in (MANIFEST, STATE, PROGRESS):
        (run.own_folder(name) / record).unlink(missing_ok=True)


def _accept(run: Run, name: str, fingerprint: dict[str, Any], accepted: dict[str, Any]) -> None:
    """Serve a finished stage although it was made of something else, and leave the trace in its manifest."""
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
    for reason in state.reasons[:5]:
        say(name, f"damaged: {reason}; making it again")
    _withdraw(run, name)
