"""All files of a run, and the check of each: by its stage's manifest, a checkpoint's marker, or its own checksum. Files
without any of these are listed in a note."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from drover.pipeline.contract.external_inputs import HASHES
from drover.pipeline.contract.locks import LOCKS
from drover.pipeline.contract.manifest import MANIFEST, Manifest, not_as_used, read_manifest
from drover.pipeline.contract.run import run_in
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.start_record import STARTED
from drover.pipeline.contract.state import PROGRESS
from drover.pipeline.contract.tasks import UNITS
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, seal_of
from drover.pipeline.data.text_shards import SPLITS
from drover.pipeline.records.checkpoints import CHECKPOINTS, MARKER, named_after_steps, whole_marker
from drover.pipeline.records.generation_settings import FILE as GENERATION
from drover.pipeline.records.rollbacks import ROLLBACKS
from drover.pipeline.storage.mirror import SENT as SENT_NOTES
from drover.pipeline.tokenization.kinds import RECORD, vocabulary_record
from drover.tools.verify.checks import (
    Check,
    Findings,
    Recorded,
    check_ledger,
    check_plan,
    check_seal,
    check_shard,
    check_source,
    check_tensorboard,
)

ASIDE = "quarantined or not finished: unused, and not read"
LOGS = "logs and notes: nothing records their content"
BEGUN = "of a stage that is not finished: nothing records its content yet"
SCRATCH = "left by a kill after the stage was done: the next start of the stage removes them"
BEHIND = "listed in a damaged record: not read"
OTHERS = "outside of the stages: not part of the run"
FAR = "in an object store: not read"
SENT = "records of uploads to an object store: drover copy-tokens --compare checks the uploaded files"
UNSAMPLED = "input files that the sample leaves out"
PACKING = "packing"
_ONCE = ("copying.json", GENERATION, ROLLBACKS, STARTED)
"""Records that a stage cannot make again. The first is of uploads."""
_CHECKPOINT = ("Put the right file back, or run --stage train again: if it needs this checkpoint, it quarantines it "
               "and continues from the one before")
_ENDLESS = (".log", ".txt", ".err", ".out")
_OPEN = ("metrics.jsonl", "samples.jsonl", "events.jsonl")


@dataclass
class Inventory(Findings):
    """The files of a run, and the checks of them, in order.

    Attributes:
        run: its folder. share: share of the shards to read, chosen by a hash of their names; of the others only the
            size is checked. At least one shard of each split is read.
        shards, shards_read: text and token shards in all, and those that are read.
        recorded: files that a manifest or marker lists.
    """

    run: str = ""
    shards: int = 0
    shards_read: int = 0

    def __post_init__(self) -> None:
        self.folder, self.share = Path(self.run), 1.0
        self.checks = list[Check]()
        self.recorded, self.manifests = set[Path](), dict[str, tuple[Path, Manifest]]()

    def take(self, share: float = 1.0) -> list[Check]:
        """Find all files. Returns their checks."""
        self.share, config = share, self.folder / "config.yaml"
        self._sealed(config, "Restore it from a copy, or run a stage of this run again with its original "
                             "configuration: this writes it again")
        run = None
        try:
            run = run_in(self.folder)
        except Exception as error:  # noqa: BLE001 - a changed byte of YAML may be anything
            with suppress(OSError):  # the check of its seal says so
                if seal_of(config) == "sealed":
                    raise UserError(f"{config} cannot be read: {error}") from None
        folders = {stage: run.stage_folder(stage) if run else self.folder / stage for stage in STAGES}
        for stage, folder in folders.items():
            self._stage(stage, folder)
        for stage, what in not_as_used({stage: manifest for stage, (_, manifest) in self.manifests.items()}).items():
            self.problem(self.manifests[stage][0] / MANIFEST, what, "Restore the stage from a copy; if you made it "
                         "again, make those again too (--force)")
        self._shards(bool(run and run.config.train.tokens_from))
        self._outside_stages({*folders})
        return self.checks

    def lines(self, shown: int = 3) -> list[str]:
        """The report as lines of text, with `shown` files of each note."""
        sampled = f" ({self.shards_read:,} of {self.shards:,} shards; of the others the size)" \
            if self.shards != self.shards_read else ""
        told = [f"{self.run}: {self.files:,} files, {self.bytes / 1e6:,.1f} MB read and compared with their "
                f"records{sampled}"]
        for note, files in sorted(self.notes.items()):
            told.append(f"{note}: {len(files):,} ({first(files, shown)})")
        return [*told, *(f"WRONG  {problem}" for problem in self.problems),
                f"{len(self.problems):,} problems" if self.problems else "nothing is wrong"]

    def _sealed(self, path: Path, do: str, *, passing: bool = False) -> None:
        """Check a record that needs a checksum."""
        self.checks.append(Check(check_seal, (path, do, True), passing))

    def _passing(self, function: Callable[..., None], path: Path, *given: str) -> None:
        """Check a file that a run that is working may remove."""
        self.checks.append(Check(function, (path, *given), passing=True))

    def _file(self, folder: Path, record: Record, do: str, *, passing: bool = False) -> None:
        file = Recorded(folder, record, do)
        self.recorded.add(file.path)
        self.checks.append(Check(Findings.compare, (file,), passing))

    def _stage(self, stage: str, folder: Path) -> None:
        """The manifest of a stage, the files that it and the markers of checkpoints list, and all others there."""
        if not folder.is_dir():
            return
        path, damaged, finished = folder / MANIFEST, False, False
        if path.exists():
            do = f"Restore it from a copy, or run --stage {stage} --force"
            self._sealed(path, do)
            try:
                damaged = seal_of(path) != "sealed"
                manifest = None if damaged else read_manifest(folder)
            except OSError:  # the check of its seal says so
                manifest, damaged = None, True
            except UserError as error:
                manifest, damaged = None, True
                self.problem(path, f"it cannot be read ({error})", do)
            if finished := manifest is not None:
                self.manifests[stage] = folder, manifest
                self._outputs(stage, folder, manifest)
        if stage == "train":
            for checkpoint in named_after_steps(folder / CHECKPOINTS):
                self._checkpoint(checkpoint)
        left = manifest.left_scratch(folder) if finished and manifest is not None else []
        for path in _files(folder):
            if any(scratch in (path, *path.parents) for scratch in left):
                self.note(SCRATCH, path)
            elif path not in self.recorded and path != folder / MANIFEST:
                self._other(stage, path, path.relative_to(folder), BEHIND if damaged else "" if finished else BEGUN)

    def _outputs(self, stage: str, folder: Path, manifest: Manifest) -> None:
        for record in manifest.outputs:
            if _is_shard(stage, record):
                self.recorded.add(folder / record["path"])
            else:
                self._file(folder, record, _repair(stage))
        for record in manifest.files:
            if "://" in record["path"]:
                self.note(FAR, record["path"])
            elif self._chosen(record["name"]):
                self.checks.append(Check(check_source, (Path(record["path"]), record, stage)))
            else:
                self.note(UNSAMPLED, record["path"])

    def _checkpoint(self, folder: Path) -> None:
        """The marker of a checkpoint that no manifest lists, and its files."""
        path = folder / MARKER
        if path in self.recorded or not path.is_file():
            return
        self.recorded.add(path)
        self._sealed(path, _CHECKPOINT, passing=True)
        try:
            marker = whole_marker(folder) if seal_of(path) == "sealed" else None
        except (OSError, UserError):
            marker = None
        if marker is None:
            behind = [each for each in _files(folder) if each not in self.recorded]
            self.recorded.update(behind)
            self.note(BEHIND, *behind)
            return
        for record in marker["files"]:
            # If the marker is gone too, a run that is working is removing the checkpoint.
            self._file(folder, record, _CHECKPOINT, passing=(folder / record["path"]).exists() or not path.exists())

    def _other(self, stage: str, path: Path, inside: Path, unfinished: str) -> None:
        """A file in a stage's folder that no record lists."""
        name, parts = inside.as_posix(), inside.parts
        if any(map(_quarantined, parts)) or (parts[0] == CHECKPOINTS and len(parts) > 2
                                           and not (path.parents[len(parts) - 3] / MARKER).exists()):
            self.note(ASIDE, path)
        elif parts[0] == CHECKPOINTS and len(parts) > 2:
            self.problem(path, f"the checkpoint's {MARKER} does not list it", "Move it away")
        elif parts[0] == SENT_NOTES:
            self.note(SENT, path)
        elif parts[0] == PACKING:
            self._passing(check_plan, path)
        elif name == PROGRESS or parts[0] in ("hangs", "profile") or path.suffix in _ENDLESS:
            self.note(LOGS, path)
        elif parts[0] == UNITS and path.suffix == ".jsonl":
            self._passing(check_ledger, path, f"Delete it: --stage {stage} repeats what it needs")
        elif parts[0] == UNITS or (path.suffix == ".json" and len(parts) == 1):
            self._passing(check_seal, path, "Restore it from a copy: it cannot be made again" if name in _ONCE else
                          f"Delete it: --stage {stage} writes it again if it needs it")
        elif unfinished or name in _OPEN:
            self.note(unfinished or LOGS, path)
        else:
            self.problem(path, f"no record of the stage {stage} lists it: the run neither wrote it nor reads it",
                         "Move it away if it is yours; else find out who writes there")

    def _shards(self, stored: bool) -> None:
        """Each text shard with its token shard. stored: token shards are read from an object store, and may be missing
        here."""
        texts, tokens = (self.manifests.get(stage) for stage in ("shard", "encode"))
        of_text = {record["input"]: record for record in tokens[1].outputs} if tokens else {}
        records = {record["path"]: record for record in (texts[1].outputs if texts else ())
                   if _is_shard("shard", record)}
        vocabulary = self._vocabulary()
        paths = dict.fromkeys((*records, *of_text))
        names = {path: PurePosixPath(path).with_suffix("").as_posix() for path in paths}
        always = {min(own, key=_place) for split in SPLITS
                  if (own := [name for name in names.values() if name.startswith(f"{split}/")])}
        for path, name in names.items():
            text, token = (Recorded(made[0], record, _repair(stage)) if made and record else None
                           for stage, made, record in (("shard", texts, records.get(path)),
                                                       ("encode", tokens, of_text.get(path))))
            if stored and token and not token.path.exists():
                self.note(FAR, token.path)
                token = None
            there = [side for side in (text, token) if side is not None]
            self.shards += len(there)
            if there and (self._chosen(name) or name in always):
                self.shards_read += len(there)
                self.checks.append(Check(check_shard, (text, token, vocabulary)))
            else:
                self.checks += [Check(Findings.compare, (side, False), counted=False) for side in there]
        if texts and tokens and len(of_text) != len(records):
            self.problem(tokens[0] / MANIFEST, f"it lists {len(of_text):,} token shards for {len(records):,} text "
                                               f"shards", "Run --stage encode --force")

    def _vocabulary(self) -> Record | None:
        if (made := self.manifests.get("tokenizer")) is None:
            return None
        try:
            return vocabulary_record(made[0])
        except (UserError, AttributeError) as error:
            self.problem(made[0] / RECORD, str(error), _repair("tokenizer"))
            return None

    def _chosen(self, name: str) -> bool:
        return self.share >= 1 or _place(name) < self.share

    def _outside_stages(self, stages: set[str]) -> None:
        """Files of the run folder that belong to no stage."""
        made = self.manifests.get("report")
        reports = {record["path"]: record for record in made[1].outputs} if made else {}
        for path in _files(self.folder):
            name = path.relative_to(self.folder).as_posix()
            top = PurePosixPath(name).parts[0]
            if name == "config.yaml" or top in stages:
                continue
            if name in reports:
                self._file(self.folder, reports[name], "Delete it and run --stage report --force")
            elif top == "tensorboard":
                self._passing(check_tensorboard, path)
            elif top == HASHES:
                self._passing(check_ledger, path, "Delete it, if nothing runs")
            elif top in (LOCKS, "logs") or (top == "launch" and path.suffix != ".json"):
                self.note(LOGS, path)
            elif _quarantined(top):
                self.note(ASIDE, path)
            elif path.suffix == ".json":
                self._passing(check_seal, path, "Delete it, if nothing runs")
            else:
                self.note(OTHERS, path)


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(place) / name for name in sorted(names))


def _is_shard(stage: str, record: Record) -> bool:
    return stage in ("shard", "encode") and record.get("split") in SPLITS


def _quarantined(name: str) -> bool:
    return name.endswith((".tmp", ".damaged", ".partial")) or name.startswith("set-aside-") or ".replaced" in name


def _repair(stage: str) -> str:
    return f"Put the right file back, or delete it and run --stage {stage} again: it makes missing files"


def _place(name: str) -> float:
    """A number from 0 to 1, by a hash of a name."""
    return int(hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:13], 16) / 16**13
