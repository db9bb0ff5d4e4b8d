"""Decide from the state of a stage whether to start it, continue, keep its outputs, rebuild it or refuse."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from dataclasses import replace

from drover.pipeline.config.shapes import POSITIONS
from drover.pipeline.contract.external_inputs import listed_files, places
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.manifest import MANIFEST, Manifest, read_manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stage_work import Work, begin, set_aside
from drover.pipeline.contract.stages import STAGES, before, follows_training
from drover.pipeline.contract.start_record import restore_start, start_or_empty
from drover.pipeline.contract.state import PROGRESS, STATE, clear, left_files
from drover.pipeline.contract.tasks import finished_tasks
from drover.pipeline.contract.validity import OTHER_FILES, State
from drover.pipeline.core.console import first, say
from drover.pipeline.core.errors import UserError

MAY_CHANGE = tuple(f"config.model.{name}" for name in POSITIONS)
"""Settings that may change under a checkpoint: its weights and optimizer state stay valid."""


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
    if state.kind == "changed" and not (options.accept_changes and follows_training(name)):
        raise run.refusal(name, state.differences)
    if state.differences and state.kind != "resumable" and not STAGES[name].checkpoints:
        _report_lost_units(run, name, state)
        return _start_from_scratch(run, name, options)
    record = run.record(name)
    accepted = list(record.accepted) if record is not None else []
    if state.kind == "changed":
        _refuse_other_network(state)
        accepted += map(str, state.differences)
        if isinstance(record, Manifest) and not STAGES[name].goes_on(run.config, record.counts):
            _accept(run, name, replace(record, accepted=accepted))
            return None
    fingerprint = run.fingerprint(name)  # refuses missing files before the manifest is removed
    report_changes(name, state)
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


def _report_lost_units(run: Run, name: str, state: State) -> None:
    """Print what has changed, and how many finished tasks are lost."""
    say(name, f"settings or input have changed: {first([str(difference) for difference in state.differences])}. It "
              f"starts from scratch; finished tasks that are removed: {finished_tasks(run.own_folder(name)):,}")


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


def report_changes(name: str, state: State) -> None:
    """Print what has changed since the record of a stage that continues."""
    for difference in state.differences:
        say(name, f"changed: {difference}")
    if any(OTHER_FILES in reason for reason in state.reasons):
        say(name, f"{OTHER_FILES}; these files are read again")


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


def _refuse_other_network(state: State) -> None:
    """UserError if the changes of a stage with checkpoints make another network."""
    shape = [str(difference) for difference in state.differences
             if difference.key.startswith("config.model.") and not difference.key.startswith(MAY_CHANGE)]
    if shape:
        raise UserError(f"A checkpoint cannot continue as another network: {'; '.join(shape)}. Use --force to start "
                        f"from scratch, or name=<another>. (To extend the context, only {', '.join(POSITIONS)} may "
                        f"change.)")


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
    if name in before(["report"]):
        (run.own_folder("report") / MANIFEST).unlink(missing_ok=True)
