"""Where a document came from: its source file and record, and its dropped duplicates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from drover.pipeline.contract.run import Run
from drover.pipeline.core.files import Record
from drover.pipeline.data.planning.passes import DUPLICATES
from drover.pipeline.data.text_shards import read_shard
from drover.tools.where.search import Ids, named

_CUT = re.compile(r"\[(\d*):(\d*)\]$")


class Corpus:
    """The shard stage's outputs and records.

    Attributes:
        folder, manifest: of the shard stage, here or in the run that is reused.
        sources: names of the configured sources.
    """

    def __init__(self, run: Run) -> None:
        self.folder, self.manifest = run.stage_folder("shard"), run.finished("shard")
        self.shards = {record["path"]: record for record in self.manifest.outputs}
        self.sources = run.config.shard.source_names
        self._paths = {record["name"]: record["path"] for record in self.manifest.files}

    def text_of(self, shard: str, number: int) -> Any:
        """The document with this number in a text shard (see `read_shard`); None if the shard is missing."""
        if not (self.folder / shard).is_file():
            return None
        return next(read_shard(self.folder, self.shards[shard], only=[number]))

    def placed(self, source: str, name: str) -> Record:
        """Where a document was read from, given its place, or else its id: `file:7`, `file@1234` or `file:7[0:100]`.

        Returns:
            file: name within the source; for a dataset its split. path: of the file when it was read; None if it is
            not a local file. record: number from 1, or, for a file that was read in parts, the offset of its first byte
            (Arrow: batch and row); None for the whole file. origin: all of that as text.
        """
        cut = None if f"{source}/{name}" in self._paths else _CUT.search(name)
        whole = name if cut is None else name[:cut.start()]
        ends = [len(whole), *(at for at in reversed(range(len(whole))) if whole[at] in ":@")]
        end = next((end for end in ends if f"{source}/{whole[:end]}" in self._paths), None)
        if end is None:  # a record of a dataset, whose files are unknown here
            split, _, number = whole.rpartition(":")
            end = len(split) if split and number.isdigit() else len(whole)
        file, sign, at = whole[:end], whole[end:end + 1], whole[end + 1:]
        path, record = self._paths.get(f"{source}/{file}"), int(at) if sign == ":" and at.isdigit() else at or None
        place = "" if record is None else f", {'record' if isinstance(record, int) else 'at'} {record}"
        characters = f", characters {cut[1] or 0}..{cut[2]}" if cut else ""
        return {"origin": f"{path or file}{place}{characters}", "file": file, "path": path, "record": record}

    def duplicates(self, ids: Ids, whose: Literal["", "kept_"] = "") -> Iterator[dict[str, str]]:
        """Rows of `duplicates/*.parquet` whose own id is in `ids`; with `kept_` that of the document that was kept."""
        import pyarrow.compute as pc
        from pyarrow import array, parquet, string
        column, wanted = f"{whose}id", array(sorted({name for _, name in ids}), string())
        for record in self.manifest.outputs:
            if record.get("split") != DUPLICATES:
                continue
            for batch in parquet.ParquetFile(self.folder / record["path"]).iter_batches():
                for row in batch.filter(pc.is_in(batch.column(column), value_set=wanted)).to_pylist():
                    if named(ids, row[f"{whose}source"], row[column]):
                        yield row
