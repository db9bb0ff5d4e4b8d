"""The run folder and the state of each stage in it. Which outputs may be trusted is decided here alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipeline.config.loading import load_config
from pipeline.config.section import identity
from pipeline.config.tree import Config
from pipeline.errors import UserError, listed
from pipeline.files import read_json, sha256_file
from pipeline.manifest import Difference, Manifest, differences, read_manifest
from pipeline.parts import identity_key, marked_parts
from pipeline.stages import REPOSITORY, STAGES, Stage, before

STARTED = "started.json"
Kind = Literal["done", "to do", "partial", "damaged", "stale", "waiting"]


@dataclass(frozen=True)
class State:
    """What is to be thought of a stage's folder.

    kind: `done`; `to do`; `partial` (begun, can be continued); `damaged` (an output is gone: only that is redone);
        `stale` (made of something else than what is asked now); `waiting` (a stage before it is not done).
    differences: for `stale`, what differs; for `to do`, from an attempt that refused its own input.
    reasons: sentences that say more.
    begun_only: for `stale`, whether it was merely begun, not finished.
    """

    kind: Kind
    differences: list[Difference] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    begun_only: bool = False

    def __str__(self) -> str:
        if self.kind == "stale":
            first = "; ".join(map(str, self.differences[:2]))
            more = len(self.differences) - 2
            return f"stale: {first}" + (f" and {more} more" if more > 0 else "")
        return self.kind + (f" ({self.reasons[0]})" if self.reasons else "")


class Run:
    """The folder of one run: `config.yaml`, a folder per stage, `logs/`, `tensorboard/`, the report."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = config.folder
        self._known_files: dict[str, list[dict[str, Any]]] = {}

    @cached_property
    def reused(self) -> Run | None:
        """The run named by `reuse:`, as it was configured; UserError if there is none."""
        if self.config.reuse is None:
            return None
        folder = Path(self.config.reuse)
        if not (folder / "config.yaml").is_file():
            raise UserError(f"reuse: {folder} holds no run (no config.yaml there). Give the folder of a run whose "
                            f"{', '.join(name for name, stage in STAGES.items() if stage.reusable)} are finished.")
        config = load_config(folder / "config.yaml", check=False)
        if self.folder.resolve() in _reuse_chain(folder):
            raise UserError(f"reuse: {folder} is, or reuses, this very run ({self.folder}). Leave reuse= out, or give "
                            f"this run another name=.")
        # The folder may have been moved or copied: it, not its own old name, is what the user pointed at.
        return Run(config.model_copy(update={"runs_dir": str(folder.parent), "name": folder.name}))

    def own_folder(self, stage: str) -> Path:
        """Where this run keeps the stage."""
        return self.folder / stage

    def stage_folder(self, stage: str) -> Path:
        """Where the stage's outputs are: in this run or, by reference, in the reused one."""
        own = self.own_folder(stage)
        if not STAGES[stage].reusable or self.reused is None or (own / STARTED).exists():
            return own
        elsewhere = self.reused.stage_folder(stage)
        return elsewhere if read_manifest(elsewhere) is not None else own

    def is_reused(self, stage: str) -> bool:
        """Whether the stage's outputs are taken from another run."""
        return self.stage_folder(stage) != self.own_folder(stage)

    def manifest(self, stage: str) -> Manifest | None:
        """The stage's manifest, or None while it is not finished."""
        return read_manifest(self.stage_folder(stage))

    def finished(self, stage: str) -> Manifest:
        """The manifest of a finished stage; UserError where there is none."""
        manifest = self.manifest(stage)
        if manifest is None:
            raise UserError(f"The stage {stage} of {self.folder} is not done. Run it first "
                            f"(--stage {stage}, or --stage all), or take it from another run with reuse=<folder>.")
        return manifest

    def fingerprint(self, stage: str) -> dict[str, Any]:
        """The identity that the stage would have now; UserError if a stage before it is not done."""
        spec = STAGES[stage]
        return {"config": {part: identity(getattr(self.config, part)) for part in spec.reads},
                "inputs": {need: self.finished(need).digest for need in spec.needs},
                "files": {record["name"]: record["sha256"] for record in self.files(stage)}}

    def files(self, stage: str) -> list[dict[str, Any]]:
        """The stage's outside input files with path, bytes, mtime_ns and sha256.

        A file whose path, size and modification time are those of the manifest, or of the start record of a stage
        that is not finished, is not hashed again.
        """
        if stage not in self._known_files:
            manifest = self.manifest(stage)
            records = manifest.files if manifest else _started(self.own_folder(stage)).get("files", [])
            known = {record["path"]: record for record in records}
            self._known_files[stage] = [_file_record(name, path, known.get(str(path.absolute())))
                                        for name, path in STAGES[stage].input_files(self.config)]
        return self._known_files[stage]

    def state(self, stage: str) -> State:
        """Whether the stage is done, to do, or not to be trusted. Reads only; never hashes unchanged files."""
        folder, spec = self.stage_folder(stage), STAGES[stage]
        manifest = read_manifest(folder)
        absent = [need for need in spec.needs if self.manifest(need) is None]
        if absent:
            # What is gone may come back as it was (a killed repair, a deleted folder): then this stage is done.
            changed = self.changed_settings(stage)
            return State("stale", changed) if changed else State("waiting", reasons=[f"for {', '.join(absent)}"])
        if manifest is not None:
            changed = self._changed(spec, manifest)
            if changed:
                return State("stale", changed)
            missing = manifest.missing_outputs(folder)
            return State("damaged", reasons=missing) if missing else State("done", reasons=self._origin(stage))
        if not (folder / STARTED).is_file():
            return State("to do")
        changed = differences(_started(folder)["fingerprint"], self.fingerprint(stage))
        if changed and _started(folder).get("failed") and stage != "train":
            return State("to do", changed, reasons=["refused its input before; starts afresh with the new"])
        if changed:
            return State("stale", changed, begun_only=True)
        return State("partial", reasons=["will continue"])

    def begun_drift(self, stage: str) -> list[dict[str, Any]]:
        """The drift that was accepted for a stage that is begun and not finished."""
        return list(_started(self.own_folder(stage)).get("drift", []))

    def changed_settings(self, stage: str) -> list[Difference]:
        """Settings in which a finished stage differs from what is asked now, its inputs apart."""
        manifest = self.manifest(stage)
        if manifest is None:
            return []
        now = {part: identity(getattr(self.config, part)) for part in STAGES[stage].reads}
        if any(accepted["config"] == now for accepted in manifest.accepted):
            return []
        return differences({**manifest.fingerprint, "inputs": {}, "files": {}},
                           {"config": now, "inputs": {}, "files": {}})

    def refuse_stale_inputs(self, stage: str) -> None:
        """UserError if a stage that this one is made of, directly or not, was made with other settings.

        Their outside files are not looked at: the corpus need not be here any more when its tokens are trained on.
        """
        for need in before([stage]):
            if changed := self.changed_settings(need):
                raise self.refusal(need, State("stale", changed))

    def changed_code(self, stage: str) -> list[str]:
        """Source files that differ from those that made the finished stage."""
        manifest = self.manifest(stage)
        if manifest is None:
            return []
        now = code_hashes(STAGES[stage])
        return sorted(path for path in now.keys() | manifest.code.keys() if now.get(path) != manifest.code.get(path))

    def why(self, stage: str) -> str:
        """All that is known about why the stage is or is not up to date."""
        state = self.state(stage)
        lines = [f"{stage}: {state.kind}", *(f"  {reason}" for reason in state.reasons),
                 *(f"  {difference}" for difference in state.differences)]
        if state.kind == "done" and (changed := self.changed_code(stage)):
            lines.append(f"  made by other code: {', '.join(changed)} (recorded; --force rebuilds)")
        return "\n".join(lines)

    def refusal(self, stage: str, state: State) -> UserError:
        """Why a stale stage is not served, and the ways on."""
        shown = [str(difference) for difference in state.differences[:12]]
        if len(state.differences) > 12:
            shown.append(f"... and {len(state.differences) - 12} more (--why {stage})")
        was = "was begun" if state.begun_only else "was made"
        where = self.stage_folder(stage)
        accepting = "" if state.begun_only and stage != "train" else \
            " --accept-drift to go on with what is there (this leaves its trace in every later manifest),"
        ways = ("change reuse=, or leave it out to make this stage here" if self.is_reused(stage) else
                f"--force to rebuild it,{accepting} or name=<another> for a run of its own (reuse={self.folder} shares "
                f"what still fits)")
        return UserError(f"The stage {stage} in {where} {was} with other inputs or settings than are asked for now, "
                         f"so it is neither served nor overwritten. What differs, old -> new:\n"
                         f"{listed([*shown])}\nWays on: {ways}.")

    def _changed(self, spec: Stage, manifest: Manifest) -> list[Difference]:
        now = self.fingerprint(spec.name)
        if now in manifest.accepted:
            return []
        return differences(manifest.fingerprint, now)

    def _origin(self, stage: str) -> list[str]:
        return [f"from {self.stage_folder(stage).parent}"] if self.is_reused(stage) else []


def done_parts(run: Run, stage: str, parts: int) -> set[int]:
    """Which of `parts` parts of a stage that is begun are done, with the settings and inputs of now.

    Of a stage that is to be forced nothing is: its parts go with all else.
    """
    folder = run.own_folder(stage)
    if not marked_parts(folder, parts):
        return set()  # then nothing need be hashed
    try:
        key = identity_key(run.fingerprint(stage))
    except UserError:
        return set()  # a stage before it, or an input file, is gone: the stage itself will say so
    return marked_parts(folder, parts, key)


def force_id(folder: Path) -> str | None:
    """What the last `--force-id` that the stage in `folder` was begun under said; None if there was none."""
    try:
        found: str | None = read_json(folder / STARTED).get("force_id")
        return found
    except (FileNotFoundError, ValueError, AttributeError):  # not begun, or torn: whoever forces it starts it afresh
        return None


def code_hashes(stage: Stage) -> dict[str, str]:
    """sha256 of each source file that makes the stage's outputs, by path in the repository."""
    return {path.as_posix(): sha256_file(REPOSITORY / path) for path in stage.source_files()}


def _started(folder: Path) -> dict[str, Any]:
    """The start record of a stage, {} if it was not begun."""
    try:
        record: dict[str, Any] = read_json(folder / STARTED)
        return record if record["fingerprint"] else {}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / STARTED} is damaged. Run the stage with --force to start it afresh.") from None


def _reuse_chain(folder: Path) -> list[Path]:
    """The run in `folder` and those that it takes stages from, resolved."""
    chain: list[Path] = []
    while (here := folder.resolve()) not in chain:
        chain.append(here)
        reuse = load_config(folder / "config.yaml", check=False).reuse if (folder / "config.yaml").is_file() else None
        folder = Path(reuse) if reuse is not None else folder
    return chain


def _file_record(name: str, path: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    try:
        stat = path.stat()
        if known and (known["bytes"], known["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns):
            return {**known, "name": name}
        return {"name": name, "path": str(path.absolute()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns,
                "sha256": sha256_file(path)}
    except OSError as error:
        raise UserError(f"The input file {path} cannot be read: {error.strerror}.") from None
