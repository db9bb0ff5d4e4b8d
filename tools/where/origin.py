"""Where a document came from: its source file and record, and the copies that were dropped for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.config.data import StdlibSource
from pipeline.contract.run import Run
from pipeline.data.planning.kept import DUPLICATES
from pipeline.data.planning.origins import origins_path, read_origins
from pipeline.data.text_shards import read_shard

_CUT = re.compile(r"\[(\d*):(\d*)\]$")


@dataclass(frozen=True)
class Origin:
    """Where a document was read.

    Attributes:
        file: by its name within the source; of a dataset its split.
        path: where it lay then; None if it is no file here.
        record: number from 1, or, of a file that was read in parts, the offset of its first byte (Arrow: batch and
            row); None: all of the file.
        characters: which of the record's characters; "" for all of them.
    """

    file: str
    path: str | None
    record: int | str | None
    characters: str = ""

    def __str__(self) -> str:
        place = self.file if self.path is None else self.path
        record = "" if self.record is None else \
            f", record {self.record}" if isinstance(self.record, int) else f", at {self.record}"
        return f"{place}{record}{f', characters {self.characters}' if self.characters else ''}"


class Corpus:
    """The shard stage's outputs and records.

    Attributes:
        folder, manifest: of the shard stage, here or in the run that is reused.
        sources: by name, as they are configured.
    """

    def __init__(self, run: Run) -> None:
        self.folder, self.manifest = run.stage_folder("shard"), run.finished("shard")
        self.shards = {record["path"]: record for record in self.manifest.outputs}
        self.sources = {source.name: source for source in run.config.shard.sources}
        self._paths = {record["name"]: record["path"] for record in self.manifest.files}

    def text_of(self, shard: str, number: int) -> Any:
        """The document of this number in a text shard (see `read_shard`); None where the shard is gone."""
        if not (self.folder / shard).is_file():
            return None
        return next(read_shard(self.folder, self.shards[shard], only=[number]))

    def origin(self, shard: str, number: int, source: str, own: str) -> Origin | None:
        """Where the document of this number and id in a text shard was read; None where that was not recorded."""
        if origins_path(shard) in self.shards and (place := read_origins(self.folder, shard, number)[0]):
            return self.placed(source, place)
        about = self.sources.get(source)
        if about is None or (not isinstance(about, StdlibSource) and about.id_field):
            return None
        return self.placed(source, own)

    def placed(self, source: str, name: str) -> Origin:
        """What a name such as `file:7` or `file@1234` means: the file of that name, where there is one."""
        if (path := self._paths.get(f"{source}/{name}")) is not None:
            return Origin(name, path, None)
        cut = _CUT.search(name)
        whole, characters = (name, "") if cut is None else (name[:cut.start()], f"{cut[1] or 0}..{cut[2]}")
        for end in [len(whole), *(at for at in reversed(range(len(whole))) if whole[at] in ":@")]:
            if (path := self._paths.get(f"{source}/{whole[:end]}")) is not None:
                record = whole[end + 1:]
                numbered = record.isdigit() and whole[end] == ":"
                return Origin(whole[:end], path, int(record) if numbered else record or None, characters)
        split, _, number = whole.rpartition(":")  # of a dataset, whose files are not known here
        numbered = bool(split) and number.isdigit()
        return Origin(split if numbered else whole, None, int(number) if numbered else None, characters)

    @property
    def names_duplicates(self) -> bool:
        """Whether it was recorded which document was kept instead of each that was dropped."""
        return any(record.get("split") == DUPLICATES for record in self.manifest.outputs)

    def duplicates(self, *, of: set[tuple[str, str]] | None = None,
                   ids: frozenset[tuple[str, str]] = frozenset()) -> Iterator[dict[str, str]]:
        """Rows of `duplicates/*.parquet`: those whose kept document (source, id) is in `of`, or that are themselves in
        `ids` (source "" means any)."""
        import pyarrow.compute as pc
        from pyarrow import array, parquet, string
        column, wanted = ("kept_id", of) if of is not None else ("id", ids)
        own = array(sorted({name for _, name in wanted}), string())
        for record in self.manifest.outputs:
            if record.get("split") != DUPLICATES:
                continue
            for batch in parquet.ParquetFile(self.folder / record["path"]).iter_batches():
                for row in batch.filter(pc.is_in(batch.column(column), value_set=own)).to_pylist():
                    source = row["kept_source" if of is not None else "source"]
                    if (source, row[column]) in wanted or ("", row[column]) in wanted:
                        yield row
