"""The run folder and the state of each stage in it. Only this module decides which outputs are valid."""

from __future__ import annotations

import os
from functools import cached_property, partial
from pathlib import Path

from pydantic import BaseModel

from drover.pipeline.config.kinds import PLUGINS, imported_plugins, left_out, source_of
from drover.pipeline.config.loading import POSITIONS, read_without_plugins
from drover.pipeline.config.section import EXTERNAL, flatten, identity
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.inputs import PresentFiles, listed_files, listing_digest, look
from drover.pipeline.contract.manifest import (
    MANIFEST,
    STARTED,
    Difference,
    ExternalFile,
    Fingerprint,
    ListedFile,
    Manifest,
    StartRecord,
    State,
    in_words,
    read_manifest,
    read_start,
    record_differences,
    stage_state,
)
from drover.pipeline.contract.stages import REPOSITORY, STAGES, Stage, before, follows_training
from drover.pipeline.contract.workers import finished_tasks
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError, all_problems, all_results
from drover.pipeline.core.files import opened, sha256_file


class Run:
    """The folder of one run: `config.yaml`, a folder per stage, `logs/`, TensorBoard's files, the report.

    without: a note on the plugins of the run that this process has not imported; "" if there are none.
    """

    def __init__(self, config: Config, without: str = "") -> None:
        self.config = config
        self.without = without
        self.folder = config.folder
        self._known_files: dict[tuple[str, str, bool], PresentFiles] = {}
        self._listings: dict[str, list[ListedFile]] = {}
        self._manifests: dict[Path, tuple[tuple[int, ...], Manifest]] = {}

    @cached_property
    def reused(self) -> Run | None:
        """The run named by `reuse:`, with its own configuration; UserError if there is no run."""
        if self.config.reuse is None:
            return None
        folder = reused_folder(self.folder, self.config.reuse)
        if not (folder / "config.yaml").is_file():
            raise UserError(f"reuse: {folder} holds no run (no config.yaml there). Give the folder of a run whose "
                            f"{', '.join(name for name, stage in STAGES.items() if stage.reusable)} are finished.")
        if self.folder.resolve() in _reuse_chain(folder):
            raise UserError(f"reuse: {folder} is, or reuses, this same run ({self.folder}). Leave reuse= out, or give "
                            f"this run another name=.")
        return run_in(folder)

    def own_folder(self, stage: str) -> Path:
        """Where this run keeps the stage."""
        return self.folder / stage

    def stage_folder(self, stage: str) -> Path:
        """Where the stage's outputs are: in this run or, by reference, in the reused one."""
        own = self.own_folder(stage)
        made_in_run = (own / STARTED).exists() or (own / MANIFEST).exists()
        if not STAGES[stage].reusable or self.reused is None or made_in_run:
            return own
        elsewhere = self.reused.stage_folder(stage)
        return elsewhere if self._manifest_in(elsewhere) is not None else own

    def is_reused(self, stage: str) -> bool:
        """Whether the stage's outputs come from another run."""
        return self.stage_folder(stage) != self.own_folder(stage)

    def manifest(self, stage: str) -> Manifest | None:
        """The stage's manifest, or None while it is not finished."""
        return self._manifest_in(self.stage_folder(stage))

    def _manifest_in(self, folder: Path) -> Manifest | None:
        """The manifest in a stage's folder. It is parsed again only if the file has changed: it may have a hundred
        thousand outputs, and one start needs it a dozen times."""
        try:
            with opened(folder / MANIFEST) as file:  # network file systems ask their server when a file is opened
                result = os.fstat(file.fileno())
        except OSError:
            return read_manifest(folder)  # None, or an error
        which = (result.st_ino, result.st_size, result.st_mtime_ns)
        known = self._manifests.get(folder)
        if known is None or known[0] != which:
            manifest = read_manifest(folder)
            if manifest is None:
                return None
            known = self._manifests[folder] = which, manifest
        return known[1]

    def forget_manifests(self) -> None:
        """Free the memory of parsed manifests; they are read again when they are needed."""
        self._manifests.clear()

    def finished(self, stage: str) -> Manifest:
        """The manifest of a finished stage; UserError if there is none."""
        manifest = self.manifest(stage)
        if manifest is None:
            other = ", or take it from another run with reuse=<folder>" if STAGES[stage].reusable else ""
            raise UserError(f"The stage {stage} of {self.folder} is not done. Run it first (--stage {stage}, or "
                            f"--stage all){other}.")
        return manifest

    def fingerprint(self, stage: str) -> Fingerprint:
        """The identity that the stage would have if it started now; UserError if a stage before it is not done.

        It contains the hashes of external files, but for files that tasks read only a digest of their list. The tasks
        add the hashes.
        """
        by_units, files = all_results(lambda: self.listing(stage), lambda: self.files(stage))
        result: Fingerprint = {
            "config": self._settings(stage),
            "inputs": {need: self.finished(need).digest for need in STAGES[stage].needs},
            "files": {record["name"]: record["sha256"] for record in files}}
        if "task_files" in STAGES[stage].functions:
            result["listing"] = listing_digest(by_units)
        return result

    def listing(self, stage: str) -> list[ListedFile]:
        """Name, path, bytes and mtime_ns of the external files that the stage's tasks read, as this process first found
        them; UserError if one is missing."""
        if stage not in self._listings:
            self._listings[stage] = listed_files(STAGES[stage].input_files(self.config, "task_files"))
        return self._listings[stage]

    def files(self, stage: str) -> list[ExternalFile]:
        """The stage's external files that are hashed before it starts, with name, path, bytes, mtime_ns and sha256;
        UserError if one is missing.

        A file is not hashed again if its path, size and modification time equal those in the manifest (or, for an
        unfinished stage, in the start record).
        """
        return self._look(stage, "files", strict=True).records

    def forget_files(self) -> None:
        """Forget external files, so that the next call looks at them again."""
        self._known_files.clear()
        self._listings.clear()

    def absences(self, stages: list[str]) -> list[str]:
        """Messages about files that finished stages among `stages` have read and that are missing now. They count as
        unchanged."""
        result = {stage: self._external(stage).absent(manifest.files) for stage in stages
                 if (manifest := self.manifest(stage)) and manifest.files}
        return [f"{len(names):,} of the files that the stage {stage} read "
                f"{'is' if len(names) == 1 else 'are'} not there any more ({first(names)}); the outputs made from them "
                f"are still used"
                for stage, names in result.items() if names]

    def _external(self, stage: str) -> PresentFiles:
        """The external files of a finished stage, of both kinds."""
        return self._look(stage, "files") + self._look(stage, "task_files")

    def _look(self, stage: str, kind: str, *, strict: bool = False) -> PresentFiles:
        """The stage's external files of one kind; the result is kept. Files that its tasks read (`task_files`) are only
        hashed here to compare them with the tasks' hashes."""
        manifest = self.manifest(stage)
        key = stage, kind, strict or manifest is None
        if key not in self._known_files:
            made = manifest or read_start(self.own_folder(stage))
            STAGES[stage].function(kind)  # raise here if it cannot be imported: this must not count as missing files
            self._known_files[key] = look(
                stage, partial(STAGES[stage].input_files, self.config, kind), made.files if made else [],
                run_folder=self.folder, remember=manifest is not None, strict=key[2])
        return self._known_files[key]

    def record(self, stage: str) -> Manifest | StartRecord | None:
        """The manifest of a finished stage, the start record of an unfinished one; None if it was not started."""
        folder = self.stage_folder(stage)
        return self._manifest_in(folder) or read_start(folder)

    def state(self, stage: str) -> State:
        """The state of a stage. Only reads, and never hashes unchanged files."""
        folder = self.stage_folder(stage)
        spec = STAGES[stage]
        record = self.record(stage)
        if isinstance(record, Manifest):
            present, places = self._present(stage, record)
            missing = [*record.missing_outputs(folder), spec.call("due", self.config, folder, record, otherwise="")]
            return stage_state(record, {**present, "places": places}, missing=[text for text in missing if text],
                               keeps=spec.may_renew(record.fingerprint, present))
        if waits := [need for need in spec.needs if self.manifest(need) is None]:
            return State("absent", reasons=[f"waits for {', '.join(waits)}"])
        if record is None:
            return stage_state(None, {})
        present = self.fingerprint(stage)
        own_keys = "renews" in spec.functions and not spec.checkpoints  # each result is kept under a key of its own
        return stage_state(
            record, present, keeps=own_keys or spec.may_renew(record.fingerprint, present),
            useful=bool(spec.call("saved", folder)) if spec.checkpoints else (
                record.fingerprint != present and not record.unusable and finished_tasks(folder) > 0))

    def changed(self, stage: str) -> list[Difference]:
        """How settings, earlier stages and external files differ from those that a finished stage was made from.

        Missing raw text or a missing earlier stage counts as unchanged, unless the settings name another place for it.
        [] for a stage that is not finished.
        """
        manifest = self.manifest(stage)
        if manifest is None:
            return []
        present, places = self._present(stage, manifest)
        return record_differences(manifest, {**present, "places": places})

    def _present(self, stage: str, manifest: Manifest) -> tuple[Fingerprint, dict[str, object]]:
        """The identity that a finished stage would have now, and the places of its external files. Missing files and
        stages have their recorded hashes, and a place counts as changed only if files are missing or differ."""
        external = self._external(stage)
        recorded = manifest.fingerprint.get("inputs", {})
        inputs = {need: made.digest if (made := self.manifest(need)) else recorded.get(need)
                  for need in STAGES[stage].needs}
        files = external.compared(manifest.files)
        now = places(STAGES[stage], self.config)
        if files == manifest.fingerprint.get("files", {}):
            now = {key: (now if source_of_place(key, self.config) in external.incomplete else manifest.places).get(key)
                   for key in now | manifest.places}
        return {"config": self._settings(stage), "inputs": inputs, "files": files}, now

    def _settings(self, stage: str) -> dict[str, object]:
        return {part: identity(self.config.part(part)) for part in STAGES[stage].reads}

    def changed_code(self, stage: str) -> list[str]:
        """Source files that have changed since the stage was made; plugins only if they were imported."""
        manifest = self.manifest(stage)
        if manifest is None:
            return []
        maker = self.reused if self.reused is not None and self.is_reused(stage) else self
        now = code_hashes(STAGES[stage], self.config)
        return sorted(path for path in now.keys() | manifest.code.keys() if now.get(path) != manifest.code.get(path)
                      and (path in now or "/" in path or not maker.without))

    def why(self, stage: str) -> str:
        """An explanation of why the stage is or is not up to date, with all details."""
        state = self.state(stage)
        lines = [f"{stage}: {state.kind}", *(f"  {reason}" for reason in state.reasons),
                 *(f"  {difference}" for difference in state.differences)]
        if state.kind == "done" and (changed := self.changed_code(stage)):
            lines.append(f"  code has changed since: {', '.join(changed)} (recorded; --force rebuilds)")
        if self.without:
            lines.append(f"  {self.without} Whether they have changed is not known here.")
        return "\n".join(lines)

    @property
    def has_ended(self) -> bool:
        """Whether training is done, and the configuration asks for no further step."""
        made = self.manifest("train")
        return made is not None and self.config.train.steps <= made.counts["steps"]

    def refusal(self, stage: str, changes: list[Difference]) -> UserError:
        """The error about a stage with changes: what has changed, and what the user can do."""
        words, keys = in_words(changes), "".join(f" {change.key}" for change in changes)
        ways = ["put the files back as they were"] * (" files." in keys)
        if self.is_reused(stage):
            ways.append("change reuse=, or leave it out to make this stage here")
        else:
            later = [name for name in STAGES if name == stage or stage in before([name])]
            force = f"--stage {'all' if len(later) == len(STAGES) else ','.join(later)} --force to rebuild it"
            if "train" in later and (saved := STAGES["train"].call("saved", self.own_folder("train"))):
                model = f"{self.own_folder('train')} ({saved})"
                ways += [f"to train the model in {model} further, on old and new text, move new files into a folder of "
                         f'their own and follow docs/continue.md, "Add text to a trained model"'] * (
                    " files." in keys and stage in ("shard", "encode"))
                force += (f", which starts training again from step 0, renames {model} to train.replaced, and deletes "
                          f"the other outputs, the export too")
            trains = "keep the training, which is done" if self.has_ended else "continue training with them"
            accept = [f"--accept-changes to {trains}, and to rebuild what follows it"] * acceptable(stage, changes)
            own = "name=<another> for a run of its own" if STAGES[stage].reusable else (
                f"name=<another> reuse={self.folder} for a run of its own on the same tokens")
            ways += [own, *accept, force] if STAGES[stage].checkpoints and self.has_ended else [*accept, force, own]
        mixture = (" For another mixture from here on add train.phases, with --accept-changes (docs/phases.md): tokens "
                   "and epochs are then counted as trained.") * (" config.train.mixture" in keys)
        fixed = (f" A checkpoint cannot continue with another optimizer or as another network. (To extend the context, "
                 f"only {', '.join(POSITIONS)} may change.)") * (
            STAGES[stage].checkpoints and not acceptable(stage, changes) and " config." in keys)
        return UserError(f"The stage {stage} in {self.stage_folder(stage)} was made with other inputs or settings, so "
                         f"it is neither used nor overwritten: {all_problems(words, f'{len(words)} changes', 12)}\n"
                         f"Ways to continue: {'; or '.join(ways)}.{mixture}{fixed}")


def acceptable(stage: str, changes: list[Difference]) -> bool:
    """Whether a changed stage can be run with `--accept-changes`. Training continues, but not as another network or
    with another optimizer; the stages after it are rebuilt."""
    names = [change.key.removeprefix("config.") for change in changes if STAGES[stage].checkpoints]
    free = tuple(f"model.{name}" for name in POSITIONS)
    return follows_training(stage) and not any(
        name == "train.optimizer" or (name.startswith("model.") and not name.startswith(free)) for name in names)


def run_in(folder: Path) -> Run:
    """The run in a folder, with its configuration; UserError if there is none. The folder may have been moved or
    copied: it decides the run's name and place, not the configuration in it.

    Its plugins are not imported, because anybody may have made the folder. `config.plugins` of the result has those
    that this process has imported because the user named them, and `without` names the others.
    """
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    config = read_without_plugins(folder / "config.yaml")
    return Run(config.model_copy(update={"runs_dir": str(folder.parent), "name": folder.name,
                                         "plugins": imported_plugins(config.plugins)}),
               left_out(config.plugins, folder))


def reused_folder(run_folder: Path, reuse: str) -> Path:
    """The folder that `reuse:` of a run names. If there is no run in it, the run of that name next to this one: both
    may have been moved."""
    written = Path(reuse)
    beside = run_folder.absolute().parent / written.name
    moved = not (written / "config.yaml").is_file() and (beside / "config.yaml").is_file()
    return beside if moved and beside.resolve() != run_folder.resolve() else written


def places(stage: Stage, config: Config) -> dict[str, object]:
    """The settings that name the places of the stage's external files, by their full names."""
    if not {"files", "task_files"} & stage.functions.keys():
        return {}
    parts = {part: config.part(part) for part in stage.reads}
    values = flatten({name: part.model_dump(mode="json") if isinstance(part, BaseModel) else part
                      for name, part in parts.items()})
    return {key: value for key, value in values.items() if EXTERNAL & set(key.split("."))}


def source_of_place(key: str, config: Config) -> str:
    """The source that a key of `places` is about: the part of its files' names before the first `/`."""
    parts = key.split(".")
    if parts[-1] == "init_from":
        return parts[-1]
    if parts[:2] == ["shard", "filters"]:
        return parts[1]
    if parts[1:2] != ["sources"]:
        return parts[0]
    sources = config.part(parts[0]).sources
    number = int(parts[2])
    return sources[number].name if number < len(sources) else ""


def code_hashes(stage: Stage, config: Config | None = None) -> dict[str, str]:
    """sha256 of each source file that makes the stage's outputs, by its path in the repository. Also, by module, of
    plugins, which may take part in any stage, of the stage's `own_module` and, with a configuration, of the modules
    that it names."""
    own = {path.as_posix(): sha256_file(REPOSITORY / path) for path in stage.source_files()}
    external = PLUGINS | (stage.call("external_code", config, otherwise={}) if config else {})
    if stage.own_module and (source := source_of(stage.own_module)) is not None:
        external[stage.own_module] = source
    return own | {module: sha256_file(path) for module, path in sorted(external.items())}


def _reuse_chain(folder: Path) -> list[Path]:
    """The folders of the run in `folder` and of the runs that it takes stages from, resolved."""
    chain: list[Path] = []
    while (resolved := folder.resolve()) not in chain:
        chain.append(resolved)
        reuse = run_in(folder).config.reuse if (folder / "config.yaml").is_file() else None
        folder = reused_folder(folder, reuse) if reuse is not None else folder
    return chain
