"""The stages in order: what each needs, which settings it reads, which code makes its outputs.

This table is all that the launcher and the run folder know of a stage.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.tree import Config
from pipeline.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
SNAPSHOT = "snapshot.json"
"""In REPOSITORY, where that is the copy that a submission made: which commit it is of."""


@dataclass(frozen=True)
class Stage:
    """One stage of the chain.

    Attributes:
        needs: stages whose manifests it reads.
        reads: parts of the configuration that decide its outputs (execution fields in them do not count).
        ranks: whether it runs as ranks under torch's elastic agent; the others are one process with workers.
        parts: whether its units may be shared out among several jobs (`--part`); one more call then finishes it.
        reusable: whether `reuse:` may take it from another run.
        code: source files and folders (templates too) that make its outputs; a change there is recorded and warned of.
        files: "module:function" giving its input files that no stage made, as (name, path) pairs.
    """

    name: str
    needs: tuple[str, ...]
    reads: tuple[str, ...]
    code: tuple[str, ...]
    ranks: bool = False
    parts: bool = False
    reusable: bool = False
    files: str | None = None

    @property
    def module(self) -> str:
        """The module to run with `python -m`."""
        return f"pipeline.{self.name}"

    def input_files(self, config: Config) -> list[tuple[str, Path]]:
        """Files from outside the run that this stage reads, as (name, path), sorted by name."""
        if self.files is None:
            return []
        module, _, function = self.files.partition(":")
        return sorted(getattr(importlib.import_module(module), function)(config))

    def source_files(self) -> list[Path]:
        """The source files that make this stage's outputs, relative to the repository, sorted."""
        found: set[Path] = set()
        for entry in (*self.code, f"pipeline/{self.name}.py"):
            path = REPOSITORY / entry
            inside = (file for file in path.rglob("*") if file.suffix in (".py", ".j2", ".css"))
            found.update(inside if path.is_dir() else [path] if path.is_file() else [])
        return sorted(path.relative_to(REPOSITORY) for path in found)


STAGES = {stage.name: stage for stage in (
    Stage("shard", needs=(), reads=("shard",), parts=True, reusable=True,
          files="pipeline.data.sources:input_files",
          code=("pipeline/data/sources.py", "pipeline/data/readers.py", "pipeline/data/staging.py",
                "pipeline/data/documents.py", "pipeline/data/text_shards.py")),
    Stage("tokenizer", needs=("shard",), reads=("tokenizer",), reusable=True,
          files="pipeline.vocabulary.kinds:input_files",
          code=("pipeline/vocabulary", "pipeline/data/documents.py", "pipeline/data/text_shards.py")),
    Stage("encode", needs=("shard", "tokenizer"), reads=("encode",), parts=True, reusable=True,
          code=("pipeline/vocabulary", "pipeline/data/documents.py", "pipeline/data/text_shards.py",
                "pipeline/data/token_shards.py")),
    Stage("train", needs=("tokenizer", "encode"), reads=("seed", "model", "train"), ranks=True,
          code=("model", "pipeline/training", "pipeline/parallel", "pipeline/data/order.py", "pipeline/data/loader.py",
                "pipeline/data/exclusion.py", "pipeline/data/token_shards.py", "pipeline/evaluation/bits_per_byte.py",
                "pipeline/formats/checkpoint.py", "pipeline/formats/tensor_file.py")),
    Stage("convert", needs=("tokenizer", "encode", "train"), reads=("convert",),
          code=("model", "pipeline/formats", "pipeline/training/checkpoint.py")),
    Stage("evaluate", needs=("shard", "tokenizer", "encode", "convert"), reads=("evaluate",), ranks=True,
          files="pipeline.evaluation.tasks:input_files",
          code=("model", "pipeline/evaluation", "pipeline/formats", "pipeline/vocabulary", "pipeline/parallel/ranks.py",
                "pipeline/data/text_shards.py", "pipeline/data/token_shards.py")),
    Stage("report", needs=("shard", "tokenizer", "encode", "train", "convert", "evaluate"), reads=("report",),
          code=("pipeline/reporting",)),
)}


def before(stages: list[str], through: list[str] | None = None) -> list[str]:
    """All stages that `stages` are made of, directly or not, in the chain's order.

    With `through`, only paths that lead through those stages are followed.
    """
    found: set[str] = set()
    frontier = list(stages)
    while frontier:
        new = set(STAGES[frontier.pop()].needs) - found
        found |= new
        frontier += [stage for stage in new if through is None or stage in through]
    return [stage for stage in STAGES if stage in found]


def parse_stages(text: str) -> list[str]:
    """`all`, one stage, or a comma list, in the chain's own order; UserError for an unknown name."""
    asked = {part.strip() for part in text.split(",") if part.strip()}
    unknown = sorted(asked - set(STAGES) - {"all"})
    if unknown or not asked:
        raise UserError(f"--stage does not know {', '.join(unknown) or 'an empty list'}. "
                        f"The stages are {', '.join(STAGES)}, or all.")
    return [name for name in STAGES if "all" in asked or name in asked]
