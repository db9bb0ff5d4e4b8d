"""The stages in order: what each needs, which settings it reads, which code makes its outputs.

The launcher and the run folder know a stage only from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import drover
from drover.pipeline.config.kinds import imported
from drover.pipeline.config.shipped import STAGE_FUNCTIONS
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Fingerprint
from drover.pipeline.core.errors import REPOSITORY as REPOSITORY
from drover.pipeline.core.errors import UserError
from drover.pipeline.storage.object_files import InputFile

IMPORTED_FROM = Path(drover.__file__).resolve().parents[1]
"""The folder on Python's path that holds `drover`: the repository, or where an installed package or a copy lies."""
SNAPSHOT = "snapshot.json"
"""A file in IMPORTED_FROM, if that is the copy of the code that a submission made. It names the commit."""

WATCH = "watch"
"""The job of a submission that scores checkpoints while train runs (`drover.pipeline.watch`). It is no stage, but has a
folder with the records of one."""


FUNCTIONS = ("files", "task_files", "problems", "external_code", "renews", "due", "saved")
"""The functions that a stage may define (see `Stage.functions`)."""


@dataclass(frozen=True)
class Stage:
    """One stage of the chain.

    Attributes:
        needs: stages whose manifests it reads.
        reads: parts of the configuration that decide its outputs (execution settings in them do not count).
        ranks: whether it runs as ranks of torch.distributed.
        ranks_know_outputs: whether rank 0, which alone reads the run folder, also sends the other ranks the outputs of
            the earlier stages (`drover.pipeline.contract.broadcast`). There may be very many.
        workers: whether worker processes do its tasks (`launch.cpus`), and whether it can be stopped between tasks. A
            plugin's stage always has worker processes. Several processes may share the tasks (`--element`).
        task_modules: modules that its tasks need and that the stage's own file does not import. They are imported once,
            before workers are forked.
        checkpoints: whether it saves checkpoints in its folder. After a request to stop it saves and exits. The same
            command continues from the newest checkpoint, even with other settings.
        reusable: whether `reuse:` may take it from another run.
        own_module: the module of a plugin's stage; "" for pipeline.<name>.
        after: of a plugin's stage: the stage that it follows in the chain; "" for the last one.
        code: source files and folders (templates too) that make its outputs. If they change, a warning is printed.
        functions: functions that the contract calls, as "module:function", imported at the call:

            - `files(config)`: input files that no stage made, as (name, path) pairs. They are hashed before it starts.
            - `task_files(config)`: input files that its tasks hash while they read them. Before, they are only listed.
              The body commits with their records (`drover.pipeline.contract.inputs.gathered`).
            - `problems(config)`: why such files cannot be used, a sentence each, before any stage has run. That one is
              missing is not its business.
            - `external_code(config)`: source files from outside of Drover that a configuration names, by module name.
              If they change, a warning is printed, too.
            - `renews(old, new)`: whether a finished stage may change from the old fingerprint to the new one without
              `--force`. Its body keeps each result under an identity of its own.
            - `saved(folder)`: what a stage with checkpoints has saved, in words; "" if it would lose nothing.
            - `due(config, folder, manifest)`: what is still to do although the outputs are made; "" for nothing. The
              body then runs while the manifest exists.
    """

    name: str
    needs: tuple[str, ...]
    reads: tuple[str, ...]
    code: tuple[str, ...]
    ranks: bool = False
    ranks_know_outputs: bool = True
    workers: bool = False
    task_modules: tuple[str, ...] = ()
    checkpoints: bool = False
    reusable: bool = False
    functions: Mapping[str, str] = field(default_factory=dict)
    own_module: str = ""
    after: str = ""

    @property
    def module(self) -> str:
        """The module to run with `python -m`."""
        return self.own_module or f"drover.pipeline.{self.name}"

    def function(self, name: str) -> Callable[..., Any] | None:
        """One of its `functions`; None if it has none of that name. UserError if it cannot be imported."""
        return imported(self.functions[name], self.name) if name in self.functions else None

    def call(self, name: str, *given: Any, otherwise: Any = None) -> Any:
        """The result of one of its `functions`; `otherwise` if it has none of that name."""
        function = self.function(name)
        return otherwise if function is None else function(*given)

    def input_files(self, config: Config, *kinds: str) -> list[tuple[str, InputFile]]:
        """Files from outside of the run as (name, path), sorted by name. kinds: `files`, `task_files`, or both."""
        return sorted((result for kind in kinds or ("files", "task_files")
                       for result in self.call(kind, config, otherwise=())), key=itemgetter(0))

    def may_renew(self, old: Fingerprint, new: Fingerprint) -> bool:
        """Whether a stage with the old fingerprint may be made with the new one without `--force`."""
        return bool(self.call("renews", old, new))

    def source_files(self) -> list[Path]:
        """The source files that make this stage's outputs, relative to the repository, sorted."""
        result: set[Path] = set()
        for entry in (*self.code, f"pipeline/{self.name}.py"):
            path = REPOSITORY / entry
            inside = (file for file in path.rglob("*") if file.suffix in (".py", ".j2", ".css"))
            result.update(inside if path.is_dir() else [path] if path.is_file() else [])
        return sorted(path.relative_to(REPOSITORY) for path in result)


STAGES = {stage.name: stage for stage in (
    Stage("shard", needs=(), reads=("shard",), workers=True, reusable=True,
          task_modules=("drover.pipeline.data.reading", "drover.pipeline.data.planning.passes"),
          functions=STAGE_FUNCTIONS["shard"],
          code=("pipeline/data/sources.py", "pipeline/data/reading.py", "pipeline/data/readers.py",
                "pipeline/data/columnar.py", "pipeline/data/hub.py", "pipeline/data/streams.py",
                "pipeline/data/filters", "pipeline/data/planning",
                "pipeline/data/documents.py", "pipeline/data/item_index.py", "pipeline/data/counts.py",
                "pipeline/data/mixing.py",
                "pipeline/data/text_shards.py")),
    Stage("tokenizer", needs=("shard",), reads=("tokenizer",), workers=True, reusable=True,
          task_modules=("webdataset",),
          functions=STAGE_FUNCTIONS["tokenizer"],
          code=("pipeline/tokenization", "pipeline/data/documents.py", "pipeline/data/text_shards.py")),
    Stage("encode", needs=("shard", "tokenizer"), reads=("encode",), workers=True,
          reusable=True, task_modules=("webdataset",),
          functions=STAGE_FUNCTIONS["encode"],
          code=("pipeline/tokenization", "pipeline/data/documents.py", "pipeline/data/text_shards.py",
                "pipeline/data/token_files.py", "pipeline/data/token_shards.py")),
    Stage("train", needs=("tokenizer", "encode"), reads=("seed", "model", "train"), ranks=True,
          ranks_know_outputs=False, checkpoints=True,
          functions=STAGE_FUNCTIONS["train"],
          code=("model", "pipeline/training", "pipeline/parallel", "pipeline/records",
                "pipeline/data/sampling", "pipeline/data/exclusion.py", "pipeline/data/mixing.py",
                "pipeline/data/token_shards.py",
                "pipeline/data/remote_tokens.py",
                "pipeline/evaluation/bits_per_byte.py", "pipeline/evaluation/scores.py",
                "pipeline/formats/sharded_tensors.py", "pipeline/formats/tensor_file.py",
                "pipeline/formats/weights.py", "pipeline/formats/huggingface.py",
                "pipeline/config/loading.py")),  # reads the shape of weights in a folder
    Stage("convert", needs=("tokenizer", "encode", "train"), reads=("convert",),
          functions=STAGE_FUNCTIONS["convert"],
          code=("model", "pipeline/formats", "pipeline/records/checkpoints.py",
                "pipeline/records/weight_files.py", "pipeline/tokenization/files.py")),
    Stage("evaluate", needs=("shard", "tokenizer", "encode", "convert"), reads=("evaluate",), ranks=True,
          functions=STAGE_FUNCTIONS["evaluate"],
          code=("model", "pipeline/evaluation", "pipeline/formats", "pipeline/tokenization",
                "pipeline/config/loading.py", "pipeline/parallel/ranks.py", "pipeline/parallel/forward_only.py",
                "pipeline/data/text_shards.py", "pipeline/data/token_shards.py",
                "pipeline/data/item_index.py")),
    Stage("report", needs=("shard", "tokenizer", "encode", "train", "convert", "evaluate"), reads=("report",),
          code=("pipeline/reporting",)),
)}


def register_stage(stage: Stage) -> None:
    """Add a stage to the chain. Plugins call this when they are imported. Its settings are `stages.<name>` in the
    configuration. Its resources are those that `launch` gives to all stages.

    Raises:
        ValueError: the name is taken, no stage before it has the name that it follows or needs, it reads a part of the
            configuration or has a function that does not exist, or it names no module of its own.
    """
    if STAGES.get(stage.name) == stage:
        return
    if stage.name in STAGES:
        raise ValueError(f"There is a stage {stage.name!r} already.")
    if not stage.own_module:
        raise ValueError(f"The stage {stage.name!r} must name the module that runs it, as own_module.")
    chain = [*STAGES]
    place = chain.index(stage.after) + 1 if stage.after in chain else len(chain)
    for verb, named, known, what in (
            ("follows", {stage.after} - {""}, chain, "stage"), ("needs", stage.needs, chain[:place], "stage before it"),
            ("reads", {part.partition(".")[0] for part in stage.reads}, Config.model_fields,
             "part of the configuration"), ("has", stage.functions, FUNCTIONS, "function of stages")):
        if unknown := sorted({*named} - {*known}):
            raise ValueError(f"The stage {stage.name!r} {verb} {', '.join(unknown)}: there is no such {what}. Known "
                             f"are {', '.join(known)}.")
    later = {name: STAGES.pop(name) for name in chain[place:]}
    STAGES.update({stage.name: stage, **later})


def before(stages: list[str], through: list[str] | None = None) -> list[str]:
    """All stages that `stages` need, directly or not, in the chain's order.

    With `through`, only paths through these stages are followed.
    """
    result: set[str] = set()
    frontier = list(stages)
    while frontier:
        new = set(STAGES[frontier.pop()].needs) - result
        result |= new
        frontier += [stage for stage in new if through is None or stage in through]
    return [stage for stage in STAGES if stage in result]


def follows_training(name: str) -> bool:
    """Whether the stage, or one that it needs, has checkpoints."""
    return any(STAGES[stage].checkpoints for stage in (name, *before([name])))


def parse_stages(text: str) -> list[str]:
    """`all`, one stage, or a comma list, in the chain's own order; UserError for an unknown name."""
    names = {part.strip() for part in text.split(",") if part.strip()}
    unknown = sorted(names - set(STAGES) - {"all"})
    if unknown or not names:
        raise UserError(f"There is no stage {', '.join(unknown) or 'in an empty list'}. "
                        f"The stages are {', '.join(STAGES)}, or all.")
    return [name for name in STAGES if "all" in names or name in names]
