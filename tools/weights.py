"""Convert the weights of a Llama from one format to another.

    drover weights runs/demo --to demo-hf --format hf --dtype bf16

MODEL is a run (its newest checkpoint), a training checkpoint, a Hugging Face folder, or torchtitan's weights in DCP;
which one is detected. Output is written to <to>.partial, which is renamed when it
is complete. An interrupted conversion continues with the same command.
"""

from __future__ import annotations

import argparse
import sys
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from drover.pipeline.config.kinds import add_plugin_option
from drover.pipeline.core.console import Parser, Program, ProgressBar, counted, find_model, refuse_low, say
from drover.pipeline.records.weight_files import weights_folder
from drover.tools.draft import Draft

if TYPE_CHECKING:
    import torch

    from drover.pipeline.formats.huggingface import Read
    from drover.pipeline.formats.interface import Weights
    from drover.tools.weights_companions import Companions

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FORMS = ("hf", "dcp")
SHARD_GB = 5.0
RECORD, FORMAT = "weights.json", 1
"""What a written folder was made of, and its version."""


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("source", type=find_model, metavar="MODEL", help="a folder of weights, or a run's name")
    add_plugin_option(parser)
    parser.add_argument("--to", dest="target", required=True, type=Path, metavar="PATH", help="the folder to write")
    parser.add_argument("--format", required=True, choices=FORMS, help="Hugging Face's; or "
                        "torch.distributed.checkpoint with torchtitan's Llama 3")
    parser.add_argument("--dtype", choices=DTYPES, help="default: that of the source")
    parser.add_argument("--shard-gb", type=float, default=SHARD_GB, metavar="GB",
                        help=f"largest file, but for a tensor that is larger "
                        f"(default {SHARD_GB:g})")


def work(options: argparse.Namespace) -> None:
    """Convert."""
    refuse_low(options, "shard_gb")
    weights_folder(options.source, download=True)  # refuses a missing model before torch is imported
    import torch

    convert(options.source, options.target, options.format,
            getattr(torch, DTYPES[options.dtype]) if options.dtype else None,
            int(options.shard_gb * 1e9))


def convert(source: Path, target: Path, form: str, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Write the weights in `source` to the folder `target`. Continues an interrupted conversion.

    Raises:
        UserError: see `open_weights`, `Draft` and the modules of `drover.pipeline.formats`. The target then does not
            exist.
    """
    import torch

    from drover.pipeline.formats.huggingface import Source, huggingface_files
    from drover.pipeline.formats.weights import open_weights, reader
    from drover.tools.weights_companions import carried_files, companions_of

    with open_weights(source) as weights:
        config, companions = weights.config, companions_of(weights)
        if form == "dcp":
            from drover.pipeline.formats.dcp import dcp_files, refuse_other_networks
            refuse_other_networks(config)
        source_dtype = reduce(torch.promote_types, {weights.dtype(name) for name in weights.shapes})
        dtype = dtype or source_dtype
        say("weights", f"{weights.path} ({weights.form}): {_counted(weights)} in {_short_name(source_dtype)}")
        progress = ProgressBar("weights", f"to {form} in {_short_name(dtype)}", 0, "pieces")
        made = Source(config, dtype, reader(weights, dtype, progress.advance))
        files = dcp_files(made, companions.token_ids) if form == "dcp" else \
            huggingface_files(made, shard_bytes, companions.token_ids)
        others, sentences = carried_files(companions, form)
        files = [*{file.name: file for file in (*files, *others)}.values()]
        progress.total = sum(file.rectangles for file in files)
        made_of = {"from": str(weights.path.resolve()), "format": form, "dtype": _short_name(dtype),
                   "shard_bytes": shard_bytes, "source": _file_times(weights.path, companions)}
        with Draft(target, RECORD, made_of) as draft:
            if draft.complete:
                say("weights", f"{target} exists already, with these weights")
                return
            with progress:
                for file in files:
                    if not draft.make(file.name, file.write):
                        progress.already(progress.done + file.rectangles)
                        say("weights", f"{file.name} was finished before, and its hash matches")
            draft.describe({"format": FORMAT, "model": config.model_dump(mode="json"),
                            "token_ids": companions.token_ids, "files": list(draft.done.values())})
            _prove(draft.folder, reader(weights, dtype))
            draft.publish()
    count = counted(sum(bool(file.rectangles) for file in files), "file")
    size = sum(record["bytes"] for record in draft.done.values())
    say("weights", f"{target} ({form}): {_counted(weights)} in {_short_name(dtype)}, {count}, {size / 1e6:,.1f} MB, "
        f"read back and equal to the bit. {' '.join(sentences)}")


def _prove(folder: Path, read: Read) -> None:
    """Read every tensor back, and compare it to the bit."""
    from drover.pipeline.formats.comparison import prove_equal
    from drover.pipeline.formats.weights import open_weights

    with open_weights(folder) as written:
        prove_equal(written, read)


def _counted(weights: Weights) -> str:
    return f"{len(weights.shapes)} tensors, {weights.config.parameter_count:,} parameters"


def _short_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return next((short for short, known in DTYPES.items() if known == name), name)


def _file_times(folder: Path, companions: Companions) -> dict[str, list[int]]:
    """The source's files with size and modification time: they must not change before a conversion continues."""
    others = [path for path in (*companions.files.values(), companions.vocabulary) if path is not None]
    paths = {path.resolve() for path in (*(path for path in folder.iterdir() if path.is_file()), *others)}
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(paths)}


main = Program("python -m drover.tools.weights", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
