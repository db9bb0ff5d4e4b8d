"""Everything that lies in a run, and the check of each: by its stage's manifest, a checkpoint's marker, or its own
seal. What has neither is told."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.contract.locks import LOCKS
from pipeline.contract.manifest import MANIFEST, Manifest, read_manifest
from pipeline.contract.run import Run, run_in
from pipeline.contract.stages import STAGES
from pipeline.contract.start_record import STARTED
from pipeline.contract.state import PROGRESS, RESERVE
from pipeline.data.stored.copying import COPIES as SENT_NOTES
from pipeline.data.text_shards import SPLITS
from pipeline.encode import counted
from pipeline.errors import UserError
from pipeline.files import seal_of
from pipeline.records.checkpoints import CHECKPOINTS, MARKER, complete_checkpoints, whole_marker
from pipeline.records.generation_settings import FILE as GENERATION
from pipeline.records.pending_evaluations import EVALUATIONS
from pipeline.records.rollbacks import ROLLBACKS
from pipeline.tokenization.kinds import RECORD, vocabulary_record
from tools.verify.checks import (
    Check,
    check_file,
    check_plan,
    check_seal,
    check_shard,
    check_size,
    check_source,
    check_tensorboard,
)
from tools.verify.findings import Problem, Report

ASIDE = "set aside or not finished: nobody uses it, and it is not read"
LOGS = "logs and notes, which have no end: nothing records their content"
BEGUN = "of a stage that is not finished: nothing records its content yet"
BEHIND = "behind a manifest that is damaged: not read"
ELSEWHERE = "runs of their own beside training: verify them with --run"
OTHERS = "beside the stages: no part of the run"
CLEARED = "of an evaluation beside training: removed once it had its result"
FAR = "in an object store: not read again"
SENT = "notes of what was sent to an object store: tools.copy_tokens --compare looks at what lies there"
UNSAMPLED = "input files that the sample leaves out"
PACKING = "packing"
_ONCE = ("copying.json", GENERATION, ROLLBACKS, STARTED)
"""Records of a stage that it does not make again; the first of what training sent to a store."""
_OF_CHECKPOINT = ("Put the right file back, or run --stage train again: where it needs this checkpoint it sets it "
                  "aside and goes on from the one before")
_ENDLESS = (".log", ".txt", ".err", ".out")
_OPEN = ("metrics.jsonl", "samples.jsonl", "events.jsonl", RESERVE)


@dataclass
class Inventory:
    """The checks of a run, in order. share: of the shards that are read, by a hash of their names; of others only the
    size is looked at, but of each split one is read in any case."""

    folder: Path
    share: float
    report: Report
    checks: list[Check] = field(default_factory=list)
    manifests: dict[str, tuple[Path, Manifest]] = field(default_factory=dict)
    markers: dict[Path, dict[str, Any] | None] = field(default_factory=dict)
    tokens_from: str | None = None

    def take(self) -> list[Check]:
        """All checks."""
        config = self.folder / "config.yaml"
        mend = ("Put it back from a copy, or run a stage of this run again with the configuration that it was given, "
                "which writes it")
        self.checks.append(Check(check_seal, (config, mend)))
        if cut := self._lost_seal(config):
            self.report.problems.append(Problem(str(config), "its seal is gone: it was cut or edited", mend))
        run = self._run(config, damaged=cut or seal_of(config) == "damaged")
        self.tokens_from = run.config.train.tokens_from if run else None
        folders = {stage: run.stage_folder(stage) if run else self.folder / stage for stage in STAGES}
        for stage, folder in folders.items():
            if folder.is_dir():
                self._guarded(stage, self._stage, stage, folder)
        self._guarded("encode" if "encode" in self.manifests else "shard", self._shards)
        self._guarded("report", self._beside, {*folders})
        return self.checks

    def _guarded(self, stage: str, function: Callable[..., None], *arguments: Any) -> None:
        """Do a part. Where a record is not as it is written, its stage's manifest was changed: that is told, and what
        is behind it is not read."""
        try:
            function(*arguments)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            folder = self.manifests.pop(stage, (self.folder / stage, None))[0]
            self.report.note(BEHIND, str(folder))
            self.report.problems.append(Problem(
                str(folder / MANIFEST), f"it cannot be read ({type(error).__name__}: {error})",
                f"Put it back from a copy, or run --stage {stage} --force"))

    def _lost_seal(self, config: Path) -> bool:
        """Whether the configuration has no seal though a stage was finished here by a version that seals: each stage
        that begins writes it anew."""
        return seal_of(config) == "not sealed" and any(
            path.is_file() and seal_of(path) == "sealed" for path in
            (self.folder / stage / MANIFEST for stage in STAGES))

    def _run(self, config: Path, *, damaged: bool) -> Run | None:
        """The run, to know its plugins' stages and what it reuses; None where its configuration is damaged."""
        try:
            return run_in(self.folder)
        except Exception as error:  # noqa: BLE001 - a changed byte of YAML may be anything
            if not damaged:
                raise UserError(f"{config} cannot be read: {error}") from None
            return None

    def _stage(self, stage: str, folder: Path) -> None:
        mend, manifest = _mend(stage), self._manifest(stage, folder)
        named = {record["path"]: record for record in manifest.outputs} if manifest else {}
        if manifest is not None:
            self.manifests[stage] = folder, manifest
            _complete(stage, manifest)
            named = self._without_cleared(stage, folder, named)
            self._counts(stage, folder, manifest)
            self.checks += [Check(check_file, (folder / path, record, mend)) for path, record in named.items()
                            if not _is_shard(stage, record)]
            self._sources(stage, manifest)
        damaged = manifest is None and (folder / MANIFEST).exists()
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            if name not in named:
                self._other(stage, path, name, finished=manifest is not None, damaged=damaged)
        if stage == "train":
            self._checkpoints(folder, named)

    def _without_cleared(self, stage: str, folder: Path, named: dict[str, Any]) -> dict[str, Any]:
        """Outputs without those that the evaluation of a checkpoint removes once it has its result
        (launch/slurm/evaluations.py)."""
        gone = {"train": CHECKPOINTS, "convert": "hf"}.get(stage)
        if (gone is None or self.folder.resolve().parent.name != EVALUATIONS.name or (folder / gone).exists()
                or not (self.folder / "evaluate" / MANIFEST).is_file()):
            return named
        self.report.note(CLEARED, str(folder / gone))
        return {path: record for path, record in named.items() if PurePosixPath(path).parts[0] != gone}

    def _checkpoints(self, folder: Path, named: dict[str, Any]) -> None:
        """Whether every file is there that the marker of a checkpoint names; the manifest's are checked by it."""
        for checkpoint in complete_checkpoints(folder):
            for record in (self._marker(checkpoint) or {"files": []})["files"]:
                path = checkpoint / record["path"]
                if (path.relative_to(folder).as_posix() not in named and not path.exists()
                        and (checkpoint / MARKER).exists()):  # else a run at work removes it just now
                    self.report.problems.append(Problem(str(path), "it is missing", _OF_CHECKPOINT))

    def _marker(self, checkpoint: Path) -> dict[str, Any] | None:
        """The marker of a checkpoint; None if there is none that may be believed."""
        if checkpoint not in self.markers:
            path, marker = checkpoint / MARKER, None
            try:
                if seal_of(path) != "damaged":
                    if (marker := whole_marker(checkpoint)) is None and path.is_file():
                        raise TypeError("it is not in the form of a marker")
                    _ = [record[key] for record in (marker or {"files": []})["files"]
                         for key in ("path", "bytes", "sha256")]
            except (KeyError, TypeError) as error:
                marker = None
                self.report.problems.append(Problem(
                    str(path), f"it cannot be read ({type(error).__name__}: {error})", _OF_CHECKPOINT))
            except (OSError, UserError):
                marker = None
            self.markers[checkpoint] = marker
        return self.markers[checkpoint]

    def _manifest(self, stage: str, folder: Path) -> Manifest | None:
        """A manifest that may be believed."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        mend = f"Put it back from a copy, or run --stage {stage} --force"
        self.checks.append(Check(check_seal, (path, mend)))
        if seal_of(path) == "damaged":
            return None
        try:
            return read_manifest(folder)
        except (UserError, TypeError) as error:
            self.report.problems.append(Problem(str(path), f"it cannot be read ({error})", mend))
            return None

    def _other(self, stage: str, path: Path, name: str, *, finished: bool, damaged: bool) -> None:
        """A file in a stage's folder that its manifest does not name."""
        parts = PurePosixPath(name).parts
        if name == MANIFEST:
            return
        if any(_set_aside(part) for part in parts):
            self.report.note(ASIDE, str(path))
        elif parts[0] == CHECKPOINTS and len(parts) > 2:
            self._of_checkpoint(path, parts)
        elif parts[0] == SENT_NOTES:
            self.report.note(SENT, str(path))
        elif parts[0] == PACKING:
            self.checks.append(Check(check_plan, (path,), passing=True))
        elif name == PROGRESS:  # replaced all along
            self.report.note(LOGS, str(path))
        elif parts[0] == "units" or (path.suffix == ".json" and len(parts) == 1):
            mend = ("Put it back from a copy: it cannot be made again" if name in _ONCE else
                    f"Delete it: --stage {stage} writes what it needs of it")
            self.checks.append(Check(check_seal, (path, mend), passing=True))
        elif parts[0] in ("hangs", "profile") or path.suffix in _ENDLESS:
            self.report.note(LOGS, str(path))
        elif not finished:
            self.report.note(BEHIND if damaged else BEGUN, str(path))
        elif name in _OPEN:
            self.report.note(LOGS, str(path))
        else:
            self.report.problems.append(Problem(
                str(path), f"no record of the stage {stage} names it: the run did not make it, and reads it nowhere",
                "Move it away if it is yours; else look who writes there"))

    def _of_checkpoint(self, path: Path, parts: tuple[str, ...]) -> None:
        """A file of a checkpoint that is not the last one's, which the manifest names."""
        folder = path.parents[len(parts) - 3]
        inside = path.relative_to(folder).as_posix()
        if inside == MARKER:
            self.checks.append(Check(check_seal, (path, _OF_CHECKPOINT), passing=True))
            return
        if (marker := self._marker(folder)) is None:
            self.report.note(BEHIND if (folder / MARKER).exists() else ASIDE, str(path))
            return
        record = next((record for record in marker["files"] if record["path"] == inside), None)
        if record is None:
            self.report.problems.append(Problem(str(path), f"{MARKER} beside it does not name it", "Move it away"))
            return
        self.checks.append(Check(check_file, (path, record, _OF_CHECKPOINT), passing=True))

    def _sources(self, stage: str, manifest: Manifest) -> None:
        for record in manifest.files:
            if "://" in record["path"]:
                self.report.note(FAR, record["path"])
            elif self._chosen(record["name"]):
                self.checks.append(Check(check_source, (record, stage)))
            else:
                self.report.note(UNSAMPLED, record["path"])

    def _counts(self, stage: str, folder: Path, manifest: Manifest) -> None:
        """Whether the totals of a manifest are the sums of its records."""
        shards = [record for record in manifest.outputs if _is_shard(stage, record)]
        if stage == "encode":
            found = counted(shards)
            said = {name: manifest.counts.get(name) for name in found}
        elif stage == "shard":
            split = [{"source": record["source"], "split": record["split"], "docs": record["docs"],
                      "text_bytes": record["text_bytes"]} for record in shards]
            sums = counted(split)["splits"]
            found = {name: [sums.get(kind, {}).get(name, {}).get(what, 0) for kind in SPLITS
                            for what in ("docs", "text_bytes")] for name in manifest.counts["sources"]}
            said = {name: [value for kind in SPLITS for value in (own[kind], own["text_bytes"][kind])]
                    for name, own in manifest.counts["sources"].items()}
        else:
            return
        if found != said:
            self.report.problems.append(Problem(
                str(folder / MANIFEST), "its totals are not the sums of its records",
                f"Put it back from a copy, or run --stage {stage} --force"))

    def _shards(self) -> None:
        """Each text shard with the token shard made of it."""
        texts, tokens = (self.manifests.get(stage) for stage in ("shard", "encode"))
        of_text = {} if tokens is None else {record["input"]: record for record in tokens[1].outputs}
        vocabulary = self._vocabulary()
        records = [] if texts is None else [record for record in texts[1].outputs if _is_shard("shard", record)]
        lone = [record for path, record in of_text.items() if texts is None or path not in
                {record["path"] for record in records}]
        pairs: list[tuple[Any, Any]] = [(record, of_text.get(record["path"])) for record in records]
        pairs += [(None, record) for record in lone]
        named = [(pair, _name((pair[0] or pair[1])["path"])) for pair in pairs]
        always = {min(names, key=_place) for split in SPLITS
                  if (names := [name for _, name in named if name.startswith(f"{split}/")])}
        for (text, token), name in named:
            if tokens and token and self.tokens_from and not (path := tokens[0] / token["path"]).exists():
                self.report.note(FAR, str(path))
                token = None
            sides = [None if record is None or made is None else (made[0], record, _mend(stage))
                     for stage, made, record in (("shard", texts, text), ("encode", tokens, token))]
            there = [side for side in sides if side is not None]
            self.report.shards += len(there)
            if not there:
                continue
            if self._chosen(name) or name in always:
                self.report.shards_read += len(there)
                self.checks.append(Check(check_shard, (sides[0], sides[1], vocabulary)))
            else:
                self.checks += [Check(check_size, (folder / record["path"], record, mend))
                                for folder, record, mend in there]
        if texts is not None and tokens is not None and len(of_text) != len(records):
            self.report.problems.append(Problem(
                str(tokens[0] / MANIFEST), f"it has {len(of_text):,} token shards of {len(records):,} text shards",
                "Run --stage encode --force"))

    def _vocabulary(self) -> dict[str, Any] | None:
        if (made := self.manifests.get("tokenizer")) is None:
            return None
        try:
            return vocabulary_record(made[0])
        except (UserError, AttributeError) as error:
            self.report.problems.append(Problem(str(made[0] / RECORD), str(error), _mend("tokenizer")))
            return None

    def _chosen(self, name: str) -> bool:
        return self.share >= 1 or _place(name) < self.share

    def _beside(self, stages: set[str]) -> None:
        """What lies in the run folder itself."""
        made = self.manifests.get("report")
        reports = {} if made is None else {record["path"]: record for record in made[1].outputs}
        for path in _files(self.folder):
            name = path.relative_to(self.folder).as_posix()
            first = PurePosixPath(name).parts[0]
            if name == "config.yaml" or first in stages:
                continue
            if name in reports:
                self.checks.append(Check(check_file, (path, reports[name],
                                                      "Delete it and run --stage report --force")))
            elif first == "tensorboard":
                self.checks.append(Check(check_tensorboard, (path,), passing=True))
            elif first == "evaluations":
                self.report.note(ELSEWHERE, str(path))
            elif _set_aside(first):
                self.report.note(ASIDE, str(path))
            elif first in (LOCKS, "logs") or (first == "launch" and path.suffix != ".json"):
                self.report.note(LOGS, str(path))
            elif path.suffix == ".json":
                self.checks.append(Check(check_seal, (path, "Delete it, if nothing runs"), passing=True))
            else:
                self.report.note(OTHERS, str(path))


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, in one order everywhere."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(place) / name for name in sorted(names))


def _is_shard(stage: str, record: dict[str, Any]) -> bool:
    return stage in ("shard", "encode") and record.get("split") in SPLITS


def _complete(stage: str, manifest: Manifest) -> None:
    """KeyError or TypeError where a record has not what checks look up in it."""
    more = ("input", "input_sha256") if stage == "encode" else ()
    for record in manifest.outputs:
        _ = [record[key] for key in ("path", "bytes", "sha256", *(more if _is_shard(stage, record) else ()))]
    for record in manifest.files:
        _ = [record[key] for key in ("path", "name", *(() if "://" in record["path"] else ("sha256", "mtime_ns")))]


def _set_aside(name: str) -> bool:
    return name.endswith((".tmp", ".damaged", ".partial")) or name.startswith("set-aside-") or ".replaced-" in name


def _mend(stage: str) -> str:
    return f"Put the right file back, or delete it and run --stage {stage} again, which makes what is missing"


def _name(path: str) -> str:
    return PurePosixPath(path).with_suffix("").as_posix()


def _place(name: str) -> float:
    """A number from 0 to 1 that belongs to a name."""
    return int(hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:13], 16) / 16**13
