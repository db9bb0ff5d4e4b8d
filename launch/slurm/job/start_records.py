"""What a start of a stage left in the run folder: its last word, its manifest, checkpoints, the account of a hang."""

from __future__ import annotations

from pathlib import Path

from launch.host import Host
from launch.slurm.jobspec import JobSpec
from pipeline.contract.manifest import read_manifest
from pipeline.contract.parts import PARTS, last_word_file
from pipeline.contract.state import StageState, read_state
from pipeline.records.hangs import Hang, hang_folder, judge_hang, read_hang


def last_word(spec: JobSpec, here: Host, restart: int, start: int) -> StageState | None:
    """The stage's last word, if it is of that start of this job; of an array's element, if it was stopped."""
    state = read_state(spec.folder) if here.index is None else \
        read_state(spec.folder / PARTS, last_word_file(spec.phase, here.index, spec.parts))
    mine = (here.job, restart, start)
    return state if state and (state.job, state.restart, state.attempt) == mine else None


def was_killed(spec: JobSpec, here: Host, restart: int) -> bool:
    """Whether the job's script found that the runner of that restart had been killed (exit status 137): it says so
    before it queues the job again."""
    return (Path(spec.run) / "launch" / f"killed.{here.job}.{restart}").exists()


def point_latest(folder: Path) -> None:
    """Let `latest`, beside the folder of a start's logs, lead there."""
    temporary = folder.with_name(f"latest.{folder.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.replace(folder.with_name("latest"))


def is_committed(spec: JobSpec, here: Host) -> bool:
    """Whether the manifest is there; for an element of an array, the record that its part is done."""
    records = (spec.folder / "units" / "parts").glob(f"{spec.phase or '*'}.{here.index}-of-{spec.parts}.json")
    return (here.index is not None and any(records)) or read_manifest(spec.folder) is not None


def hang_of(spec: JobSpec, here: Host, start: int) -> Hang | None:
    """Who was late when training hung in that start; None if it did not."""
    folder = hang_folder(spec.folder, f"{here.job or 'local'}.{here.restart}.{start}")
    return judge_hang(folder, spec.ranks) if read_hang(folder) else None
