"""The manifest of a stage, which is written last and commits the stage, and the record of its start: a file until then,
then a part of the manifest. Both say what the stage is made from, and `stage_state` whether that still holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypedDict

from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import (
    Count,
    Inside,
    Outputs,
    Record,
    problems_of,
    read_record,
    sha256_json,
    typed,
    write_sealed,
)

MANIFEST = "manifest.json"
FORMAT = 1


class _File(TypedDict):
    name: str
    path: str
    bytes: Count
    mtime_ns: int


class ListedFile(_File, total=False):
    """A file from outside of the run: its absolute path, size, time, and the ETag of an object."""

    etag: str


class ExternalFile(ListedFile):
    """The same with its hash."""

    sha256: str


class Fingerprint(TypedDict, total=False):
    """Fingerprint of a stage."""

    config: dict[str, object]
    inputs: dict[str, str | None]
    files: dict[str, str]
    places: dict[str, object]
    listing: str


class GitState(TypedDict, total=False):
    """The commit of the code, and whether files differed from it."""

    commit: str
    changed: bool


class ThisStart(TypedDict, total=False):
    """A start of a stage: Slurm's job and restart, the number of the start within the job, the node."""

    job: str
    restart: int
    attempt: int
    host: str


class Execution(ThisStart, total=False):
    """How many processes made a stage."""

    processes: int
    cores: int | None
    world_size: int


@dataclass(frozen=True)
class Difference:
    """One field of a fingerprint that has changed."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        kind, _, name = self.key.partition(".")
        if kind == "files":
            change = "is new" if self.old is None else "is gone" if self.new is None else \
                f"has other content: {_short(self.old)} -> {_short(self.new)}"
            return f"input file {name} {change}"
        if kind == "inputs":
            return f"outputs of the stage {name}: {_short(self.old)} -> {_short(self.new)}"
        if kind == "places":  # not shortened: the end of a path matters
            return f"{name}: {json.dumps(self.old)} -> {json.dumps(self.new)}"
        return f"{name}: {_shown(self.old)} -> {_shown(self.new)}"


@dataclass
class Manifest:
    """The record of a finished stage.

    Attributes:
        stage: its name.
        fingerprint: its identity: `config` (settings that decide the outputs), `inputs` (digest of each needed stage's
            outputs), `files` (sha256 of each external file).
        outputs: one record per file: path inside the stage's folder, bytes, sha256, counts; `aside` if the file only
            describes where others came from.
        counts: totals of the stage, reconciled.
        config_sha256: hash of the whole resolved configuration.
        files: external files with path, bytes, mtime_ns and sha256. Bytes and time spare hashing them again.
        places: the settings that named the places of those files; not part of the identity.
        accepted: changes that `--accept-changes` accepted, in words.
        scratch: files and folders that the stage needed until its commit, and that are to be removed.
        start: the record of its start (`StartRecord`), which it replaces.
        wall_s, started, finished, software, git, code, execution: how it was made; never part of the identity.
    """

    stage: str
    fingerprint: Fingerprint
    outputs: Outputs
    counts: Record
    config_sha256: str
    files: list[ExternalFile] = field(default_factory=list)
    places: dict[str, object] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    started: str = ""
    finished: str = ""
    software: dict[str, str] = field(default_factory=dict)
    git: GitState = field(default_factory=GitState)
    scratch: list[Inside] = field(default_factory=list)
    start: dict[str, object] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    execution: Execution = field(default_factory=Execution)
    format: int = FORMAT

    @cached_property
    def digest(self) -> str:
        """The `digest` of the stage's outputs."""
        return digest(self.outputs)

    @property
    def run_s(self) -> float:
        """Seconds of the start that finished the stage; of all starts of training, which counts them."""
        return float(self.counts.get("run_s", self.wall_s))

    def write(self, folder: Path) -> None:
        """Commit the stage: write the manifest atomically, after all outputs."""
        write_sealed(folder / MANIFEST, asdict(self))

    def left_scratch(self, folder: Path) -> list[Path]:
        """Scratch files and folders that still exist in the stage's folder."""
        return [path for name in self.scratch if os.path.lexists(path := folder / name)
                and folder.resolve() in path.resolve().parents]

    def missing_outputs(self, folder: Path) -> list[str]:
        """Messages about outputs that are missing or have another size."""
        return [problem for problem in problems_of(folder, self.outputs) if problem]


def digest(outputs: Sequence[Record]) -> str:
    """Hash of the paths and contents of outputs, by their records."""
    return sha256_json(sorted([record["path"], record["sha256"]] for record in outputs))


def not_as_used(manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """Finished stages whose outputs are not those that later ones were made from, with a sentence's part that names
    these: a manifest's own checksum does not show that somebody wrote another. manifests: by stage."""
    result = dict[str, list[str]]()
    for later, manifest in manifests.items():
        inputs = manifest.fingerprint.get("inputs", {})
        for stage in inputs.keys() & manifests.keys():
            if inputs[stage] != manifests[stage].digest:
                result.setdefault(stage, []).append(later)
    return {stage: f"its outputs are not those that {', '.join(users)} {'was' if len(users) == 1 else 'were'} made from"
            for stage, users in sorted(result.items())}


def check_record(record: Record, kind: Any, stage: str) -> None:
    """UserError unless an output record in the manifest of a stage has the fields of `kind` (see `typed`)."""
    try:
        typed(record, kind)
    except ValueError as error:
        raise UserError(f"The manifest of the stage {stage} is damaged: of {record['path']}, {error}. Run the stage "
                        f"again with --force.") from None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a stage's folder, or None; UserError if it is damaged or of another version's format."""
    return read_record(folder / MANIFEST, Manifest, "Use another run name, or --force to rebuild it.", FORMAT)


def differences(old: Fingerprint, new: Fingerprint) -> list[Difference]:
    """The fields in which two fingerprints differ."""
    before, after = _fields(old), _fields(new)
    return [Difference(key, before.get(key), after.get(key))
            for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]


def in_words(changes: Sequence[Difference]) -> list[str]:
    """Each change in words; of the input files that are new, gone or changed the first each, and how many more."""
    alike = dict[object, list[Difference]]()
    for change in changes:
        kind = (change.old is None, change.new is None) if change.key.startswith("files.") else change.key
        alike.setdefault(kind, []).append(change)
    return [f"{group[0]}{f' (and so {len(group) - 1:,} more)' * (len(group) > 1)}" for group in alike.values()]


def _fields(fingerprint: Fingerprint) -> dict[str, object]:
    """One level: `config.train.lr`, `config.shard.filters.length.min_chars`, `inputs.shard`, `files.stdlib/os.py`,
    `places.shard.sources.0.paths.0`."""
    from drover.pipeline.config.section import by_kind, flatten

    groups: dict[str, Mapping[str, object]] = {
        "inputs": fingerprint.get("inputs", {}), "files": fingerprint.get("files", {}),
        "places": fingerprint.get("places", {})}
    return flatten(by_kind(fingerprint.get("config", {})), "config") | {
        f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}


def _short(digest: Any) -> str:
    return str(digest)[:12] if digest else "none"


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


STARTED = "started.json"
AGAIN = "Run the stage with --force to start from scratch."


@dataclass(frozen=True)
class StartRecord:
    """How a stage was started.

    Attributes:
        fingerprint, accepted, files: as in its manifest.
        chain: the chain of jobs (`StageJob`) that last started it; None outside of a chain.
        force_id: the last `--force-id` with which it was started; None if there was none.
        unusable: whether it refused its input, so that its finished tasks are of no use with another one.
    """

    fingerprint: Fingerprint
    at: str = ""
    accepted: list[str] = field(default_factory=list)
    files: list[ExternalFile] = field(default_factory=list)
    force_id: str | None = None
    chain: str | None = None
    unusable: bool = False

    def write(self, folder: Path) -> None:
        """Write it into a stage's folder."""
        write_sealed(folder / STARTED, asdict(self))


def read_start(folder: Path) -> StartRecord | None:
    """The start record of the stage in `folder`; None if it was not started; UserError if it is damaged."""
    if (started := read_record(folder / STARTED, StartRecord, AGAIN)) is not None:
        return started
    manifest = read_manifest(folder)
    try:
        return typed(manifest.start, StartRecord) if manifest is not None and manifest.start else None
    except ValueError as error:
        raise UserError(f"The manifest in {folder} is damaged: {error}. {AGAIN}") from None


def start_or_empty(folder: Path) -> StartRecord:
    """The start record; an empty one if there is none, or if it is damaged: `--force` then starts from scratch."""
    try:
        return read_start(folder) or StartRecord({})
    except UserError:
        return StartRecord({})


def change_start(folder: Path, **changes: Any) -> None:
    """Change values of the start record of an unfinished stage."""
    if (folder / STARTED).exists() and (started := read_start(folder)) and \
            (changed := replace(started, **changes)) != started:
        changed.write(folder)


def restore_start(folder: Path) -> None:
    """Write the start record of a finished stage as a file again, before its manifest is removed."""
    if not (folder / STARTED).exists() and (started := read_start(folder)):
        started.write(folder)


Kind = Literal["done", "resumable", "changed", "absent"]
OTHER_FILES = "some of its input files are new, missing or changed since it was started"
KEEPS = "will be made with the current settings; results that still fit are kept"


@dataclass(frozen=True)
class State:
    """The state of a stage's folder (`stage_state`).

    differences: what has changed since the record was written. reasons: sentences with details.
    """

    kind: Kind
    differences: list[Difference] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.kind == "changed":
            return f"changed: {first(in_words(self.differences), 2)}"
        return self.kind + (f" ({self.reasons[0]})" if self.reasons else "")


def stage_state(record: Manifest | StartRecord | None, present: Fingerprint, *, missing: Sequence[str] = (),
                keeps: bool = False, useful: bool = True) -> State:
    """The state of a stage.

    | record   | differences | and                          | state     |
    |----------|-------------|------------------------------|-----------|
    | none     |             |                              | absent    |
    | manifest | none        |                              | done      |
    | manifest | none        | something is missing         | resumable |
    | manifest | some        |                              | changed   |
    | manifest | some        | results that fit are kept    | resumable |
    | start    | none        |                              | resumable |
    | start    | some        |                              | changed   |
    | start    | some        | results that fit are kept    | resumable |
    | start    | some        | no finished work is of use   | absent    |

    Args:
        record: the manifest of a finished stage, the start record of an unfinished one, or neither.
        present: the identity that the stage would have now; `places` only for a finished one.
        missing: messages about outputs or uploads that a finished stage does not have.
        keeps: whether the stage itself keeps those results that still fit.
        useful: whether the stage has finished work that would be lost.
    """
    if record is None:
        return State("absent")
    changed = record_differences(record, present)
    if changed and keeps:
        return State("resumable", changed, [KEEPS])
    if changed and (useful or isinstance(record, Manifest)):
        return State("changed", changed)
    if changed:
        return State("absent", changed, ["was not finished; starts from scratch with the new input"])
    if isinstance(record, Manifest):
        return State("resumable", reasons=[*missing]) if missing else State("done")
    files = record.fingerprint.get("listing") != present.get("listing")
    return State("resumable", reasons=["will continue" + f"; {OTHER_FILES}" * files])


def record_differences(record: Manifest | StartRecord, present: Fingerprint) -> list[Difference]:
    """What has changed since the record was written."""
    recorded = record.fingerprint.copy()
    if isinstance(record, Manifest):
        recorded["places"] = record.places
    return differences(recorded, present)
