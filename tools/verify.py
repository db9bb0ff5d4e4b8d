"""Check every file of a run against the hash that was recorded when it was written.

    drover verify runs/demo
    drover verify runs/demo --sample 1% --documents --json

All stages are checked, reused ones too. Outputs are compared with their manifest, the files of checkpoints with their
marker, and input files with the hashes made when they were read. Manifests, markers and small records carry checksums
of their own. With --documents each document is also read: its text must have the hash in its key, and is encoded again
and compared with its tokens. The output also lists unknown files, and files without a recorded hash.

Exit status: 0 no problem; 1 there are problems, and each file is named with what to do; 2 there is no such run.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.config.kinds import add_run_and_plugins
from drover.pipeline.contract.inputs import HASHES
from drover.pipeline.contract.locks import LOCKS
from drover.pipeline.contract.manifest import MANIFEST, Manifest, not_as_used, read_manifest
from drover.pipeline.contract.run import run_in
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import PROGRESS
from drover.pipeline.contract.workers import TASKS
from drover.pipeline.core.background import ordered_map
from drover.pipeline.core.console import Parser, Program, ProgressBar, add_json, counted, draw, echo, first
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import (
    Record,
    bounded_lines,
    opened,
    problem_of,
    read_json,
    seal_of,
    sealing,
)
from drover.pipeline.records.checkpoints import (
    CHECKPOINTS,
    MARKER,
    SCORES,
    complete_checkpoints,
    named_after_steps,
    step_of,
    valid_marker,
)
from drover.pipeline.records.metrics import TrainingRecords
from drover.pipeline.storage.mirror import SENT

if TYPE_CHECKING:
    from drover.pipeline.data.text_shards import TextRecord

UNREAD = "not finished, quarantined, or listed in a damaged record: not read"
LOGS = "logs and notes: nothing records their content"
SCRATCH = "left by a kill after the stage was done: the next start of the stage removes them"
OTHERS = "of no stage that is known here (--plugin names those of a plugin): not read"
FAR = "in an object store: not read"
SIZED = "left out by --sample: only the size was compared"
NOT_SEALED = "notes without a checksum: only checked to be readable"
WENT = "removed while the run was verified"
TAKEN = "token shards that were made of files of tokens; their hashes are compared, no text is encoded again"
GONE = "input files that no longer exist; no problem, since their outputs are checked"
_CHECKPOINT = "Put the right file back, or run --stage train again, which quarantines this checkpoint if it needs it"


class Note(str):
    """A remark about a file that is no problem."""


@dataclass(frozen=True)
class Problem:
    """A file with a problem: what is wrong, and what to do."""

    file: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}. {self.do}."


@dataclass
class Report:
    """The result of a verification.

    Attributes:
        files: how many were compared.
        problems: in the order of the checks.
        notes: files by remark, such as that nothing records their content.
    """

    run: str
    files: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def problem(self, file: Path, what: str, do: str) -> None:
        """Add a problem of a file."""
        self.problems.append(Problem(str(file), what, do))

    def note(self, note: str, file: Path | str) -> None:
        """Add a remark about a file."""
        self.notes.setdefault(note, []).append(str(file))

    def lines(self) -> list[str]:
        """The report as lines of text."""
        return [f"{self.run}: {counted(self.files, 'file')} compared with their records",
                *(f"{note}: {len(files):,} ({first(files)})" for note, files in sorted(self.notes.items())),
                *(f"WRONG  {problem}" for problem in self.problems),
                counted(len(self.problems), "problem") if self.problems else "nothing is wrong"]


@dataclass(frozen=True)
class FileCheck:
    """One check of a file. It runs in a thread.

    Attributes:
        do: what to do if there is a problem.
        function: called with the path and the arguments. Returns the problem, a `Note`, or "".
        passing: a run that is working may remove the file meanwhile.
    """

    path: Path
    do: str
    function: Callable[..., str]
    arguments: tuple[Any, ...] = ()
    passing: bool = False

    def __call__(self) -> str:
        """Run the check. An exception is a problem of the file."""
        try:
            what = self.function(self.path, *self.arguments)
        except Exception as error:  # noqa: BLE001 - a damaged file may make any library fail
            what = f"it cannot be read ({type(error).__name__}: {error})"
        return Note(WENT) if what and self.passing and not self.path.exists() else what


def check_record(path: Path, record: Record, hashed: bool = True) -> str:
    """Compare a file's size, and its hash, with its record."""
    if problem := problem_of(path, record, hashed=hashed):
        return f"it {problem.removeprefix(f'{path} ')}"
    return "" if hashed else Note(SIZED)


def check_source(path: Path, record: Record, stage: str, hashed: bool = True) -> str:
    """Compare an input file with the size and hash that it had when the stage read it."""
    if not path.exists():
        return Note(GONE)
    problem = check_record(path, record, hashed)
    return problem if not problem or isinstance(problem, Note) else \
        f"{problem}; the stage {stage} read it as {record['name']}"


def check_seal(path: Path, required: bool = False) -> str:
    """Check a record's checksum of its own bytes. A note without one only has to be valid JSON."""
    seal = seal_of(path)
    if seal != "not sealed":
        return "" if seal == "sealed" else "its checksum does not match its content"
    if required:
        return "its checksum is missing: it was cut or edited"
    if path.suffix == ".json":
        read_json(path)
    return Note(NOT_SEALED)


def check_ledger(path: Path) -> str:
    """Check a ledger of finished tasks. Each line has a checksum; a kill may leave the last one truncated."""
    with opened(path) as file:
        for number, line in enumerate(bounded_lines(file), 1):
            if sealing(line) != "sealed" and re.search(rb'"seal": ".{64}|[0-9a-f]{64}', line[-90:]):
                return f"the checksum of line {number} does not match"
    return ""


def check_plan(path: Path) -> str:
    """Check the packing plan of a shard."""
    from drover.pipeline.data.sampling.packing import is_intact
    return "" if is_intact(path) else "it is truncated or changed"


def check_documents(path: Path, record: Record, texts: Path, text_record: TextRecord, tokenizer: Path) -> str:
    """Encode the documents of a text shard again, and compare them with its token shard. Each text must have the hash
    in its key. texts, tokenizer: folders of these stages."""
    import numpy as np

    from drover.pipeline.data.text_shards import read_shard
    from drover.pipeline.data.token_shards import TokenShard
    from drover.pipeline.tokenization.tokenizer import load_tokenizer

    shard, encoder = TokenShard(path, record), load_tokenizer(tokenizer)
    for number, document in enumerate(read_shard(texts, text_record)):
        key, length = document.key.partition("-")[0], len(document.text.encode())
        ids = [encoder.bos_id, *encoder.encode_flat([document.text])[0], encoder.eos_id]
        if (shard.document_key(number), shard.document_bytes(number)) != (key, length) \
                or not np.array_equal(shard.document_tokens(number), ids):
            return f"its document {number:,} is not the document {document.id} of {text_record['path']}, of key {key}"
    return ""


STAGE_FILES: tuple[tuple[str, Callable[..., str] | str, str], ...] = (
    (r"(.*/)?(set-aside-[^/]*|[^/]*\.replaced[^/]*|[^/]*\.(tmp|damaged|partial))(/.*)?", UNREAD, ""),
    ("packing/.*", check_plan, "Delete it: training makes it again"),
    (rf"({PROGRESS}|(metrics|samples|events)\.jsonl|({SENT}|hangs|profile)/.*|(?!{CHECKPOINTS}/).*\.(log|txt|err|out))",
     LOGS, ""),
    (rf"({TASKS}|{SCORES})/.*\.jsonl", check_ledger, "Delete it: the stage repeats what it needs"),
    (rf"({TASKS}|{SCORES})/.*|[^/]*\.json", check_seal, "Restore it from a copy. Without one, delete it: the stage "
                                                        "writes what it can"))
"""Files in a stage's folder that its records do not list: a pattern of their paths, how they are checked or what is
noted, and what to do if there is a problem. The first that fits holds."""
OTHER_FILES: tuple[tuple[str, Callable[..., str] | str, str], ...] = (
    (f"{HASHES}(/.*)?", check_ledger, "Delete it, if nothing runs"),
    (rf"({LOCKS}|logs)(/.*)?|[^/]*\.tfevents\..*|launch/(?!.*\.json$).*", LOGS, ""),
    STAGE_FILES[0],
    ("launch/.*", check_seal, "Delete it, if nothing runs"))
"""The same for files that are in no stage's folder."""


class Inventory:
    """The files of a run, and the checks of them, in order.

    Args:
        report: gets the files that no check reads, and the problems that manifests show.
        share: share of the shards and input files to hash; a hash of their names chooses them.
        documents: also encode the documents of those shards again.
    """

    def __init__(self, report: Report, share: float, documents: bool) -> None:
        self.report, self.folder, self.share = report, Path(report.run), share
        self.checks = list[FileCheck]()
        self.manifests = dict[str, tuple[Path, Manifest]]()
        config = self.folder / "config.yaml"
        self.recorded = {config}
        self._seal(config, "Restore it from a copy, or run a stage of this run again with its original configuration: "
                           "this writes it again")
        run = run_in(self.folder) if _is_sealed(config) else None
        folders = {stage: run.stage_folder(stage) if run else self.folder / stage for stage in STAGES}
        self.stored = bool(run and run.config.train.tokens_from)
        for stage, folder in folders.items():
            if folder.is_dir():
                self._stage(stage, folder)
        for stage, what in not_as_used({stage: manifest for stage, (_, manifest) in self.manifests.items()}).items():
            report.problem(folders[stage] / MANIFEST, what, "Restore the stage from a copy; if you made it again, make "
                           "those again too (--force)")
        if documents:
            self._documents()
        for path in _files(self.folder):
            inside = path.relative_to(self.folder)
            if not (inside.parts[0] in folders or path in self.recorded
                    or self._unrecorded(inside.as_posix(), path, OTHER_FILES)):
                report.note(OTHERS, path)

    def _check(self, function: Callable[..., str], path: Path, do: str, *arguments: Any, passing: bool = True) -> None:
        self.checks.append(FileCheck(path, do, function, arguments, passing))

    def _seal(self, path: Path, do: str) -> None:
        self._check(check_seal, path, do, True, passing=path.name == MARKER)

    def _stage(self, stage: str, folder: Path) -> None:
        """Queue the checks of a stage's manifest and of the files that it and the markers of checkpoints list; then
        queue or report each other file there."""
        path, manifest = folder / MANIFEST, None
        if path.exists():
            self._seal(path, f"Restore it from a copy, or run --stage {stage} --force")
            self.recorded.add(path)
            manifest = read_manifest(folder) if _is_sealed(path) else None
        if manifest is not None:
            self.manifests[stage] = folder, manifest
            self._outputs(stage, folder, manifest)
        if stage == "train":
            for checkpoint in named_after_steps(folder / CHECKPOINTS):
                self._checkpoint(checkpoint)
        scratch = manifest.left_scratch(folder) if manifest else []
        for path in _files(folder):
            inside = path.relative_to(folder).as_posix()
            if any(place in (path, *path.parents) for place in scratch):
                self.report.note(SCRATCH, path)
            elif path in self.recorded or self._unrecorded(inside, path, STAGE_FILES):
                continue
            elif _is_sealed(path.parent / MARKER) if path.parent.parent.name == CHECKPOINTS else manifest is not None:
                self.report.problem(path, f"no record of the stage {stage} lists it: the run neither wrote it nor "
                                          f"reads it", "Move it away if it is yours; else find out who writes there")
            else:
                self.report.note(UNREAD, path)

    def _outputs(self, stage: str, folder: Path, manifest: Manifest) -> None:
        for record in manifest.outputs:
            path, copy = folder / record["path"], self.folder / record["path"]
            self.recorded.add(path)
            hashed = "split" not in record or self._chosen(record)
            if self.stored and stage == "encode" and not path.exists():
                self.report.note(FAR, path)
            else:
                self._check(check_record, path, _repair(stage), record, hashed, passing=False)
            if stage == "report" and copy.exists():
                self.recorded.add(copy)
                self._check(check_record, copy, "Delete it and run --stage report --force", record)
        for source in manifest.files:
            if "://" in source["path"]:
                self.report.note(FAR, source["path"])
            else:
                self._check(check_source, Path(source["path"]), f"Put the old file back, or run --stage {stage} "
                            f"--force with the new one", source, stage, self._chosen(source), passing=False)

    def _checkpoint(self, folder: Path) -> None:
        """The marker of a checkpoint that no manifest lists, and its files."""
        path = folder / MARKER
        if path in self.recorded or not path.is_file():
            return
        self.recorded.add(path)
        self._seal(path, _CHECKPOINT)
        marker = valid_marker(folder) if _is_sealed(path) else None
        for record in marker.files if marker else ():
            file = folder / record["path"]
            self.recorded.add(file)
            # If the marker is gone too, a run that is working is removing the checkpoint.
            self._check(check_record, file, _CHECKPOINT, record, passing=file.exists() or not path.exists())

    def _unrecorded(self, inside: str, path: Path, known: Sequence[tuple[str, Callable[..., str] | str, str]]) -> bool:
        """Check or note a file that no record lists, by the first of the patterns that its path fits. Returns whether
        there is one."""
        for pattern, check, do in known:
            if re.fullmatch(pattern, inside):
                if isinstance(check, str):
                    self.report.note(check, path)
                else:
                    self._check(check, path, do)
                return True
        return False

    def _documents(self) -> None:
        """The documents of each token shard, if all three stages are finished."""
        stages = ("shard", "tokenizer", "encode")
        if not self.manifests.keys() >= {*stages}:
            return
        (texts, shard), (tokenizer, _), (tokens, encode) = map(self.manifests.__getitem__, stages)
        text_records = {record["path"]: record for record in shard.outputs}
        for record in encode.outputs:
            path = tokens / record["path"]
            if record["input"] not in text_records:
                self.report.note(TAKEN, path)
            elif self._chosen(record) and path.exists():
                self._check(check_documents, path, _repair("encode"), record, texts, text_records[record["input"]],
                            tokenizer, passing=False)

    def _chosen(self, record: Mapping[str, Any]) -> bool:
        """Whether the sample has a file, by a checksum of its name; a text shard and its token shard have one name."""
        name = Path(str(record.get("name", record["path"]))).with_suffix("")
        return zlib.crc32(os.fsencode(name)) < self.share * 2**32


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, sorted."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(place) / name for name in sorted(names))


def _is_sealed(path: Path) -> bool:
    """Whether a record has a checksum that matches. The check of it names it if it cannot be read."""
    try:
        return seal_of(path) == "sealed"
    except OSError:
        return False


def _repair(stage: str) -> str:
    return f"Put the right file back, or delete it and run --stage {stage} again: it makes missing files"


def verify(folder: Path, share: float = 1.0, *, documents: bool = False) -> Report:
    """Verify a run. share, documents: see `Inventory`."""
    report = Report(str(folder))
    checks = Inventory(report, share, documents).checks
    report.files = len({check.path for check in checks})
    damaged = set[Path]()
    with ProgressBar("verify", "files", len(checks), "checks", sys.stderr) as progress:
        for check, what in zip(checks, ordered_map(operator.call, checks), strict=True):
            progress.advance()
            if isinstance(what, Note):
                report.note(what, check.path)
            elif what:
                if check.path.parent.parent.name == CHECKPOINTS:
                    damaged.add(check.path.parent)
                report.problem(check.path, what, check.do)
    for checkpoint in sorted(damaged):
        report.note(_continued(folder / "train", damaged), checkpoint)
    return report


def _continued(train: Path, damaged: Collection[Path]) -> str:
    """From which step training would continue, and how many steps it would repeat. damaged: checkpoints."""
    complete = complete_checkpoints(train)
    last = step_of(complete[-1]) if complete else 0
    with suppress(UserError):
        last = max([last, *(line["step"] for line in TrainingRecords(train).steps[-1:])])
    valid = [step_of(path) for path in complete if path not in damaged]
    step = valid[-1] if valid else 0
    return f"damaged checkpoints, without which training continues from step {step:,} and repeats {last - step:,} steps"


def share_of(text: str) -> float:
    """Parse a share such as `1%` or `0.01`. Raises ArgumentTypeError."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share. Give 1% or 0.01, and at most 100%.")
    return share


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    parser.add_argument("--documents", action="store_true",
                        help="also read each document, encode it again and compare the tokens")
    parser.add_argument("--sample", type=share_of, default=1.0, metavar="SHARE",
                        help="hash only this share of the shards and input files (1%%), always the same ones; of the "
                             "others only the size is compared")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Verify and print; 1 if something is wrong."""
    report = verify(options.run, options.sample, documents=options.documents)
    if options.json:
        echo(json.dumps(asdict(report), indent=1))
    else:
        draw(*report.lines())
    return bool(report.problems)


main = Program("python -m drover.tools.verify", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
