"""Carry the weights of a Llama from one form into another.

    python -m tools.weights --from Llama-3.2-1B --to 1b --format drover
    python -m tools.weights --from runs/demo --to demo-meta --format meta --parts 2 --dtype bf16

What is at --from is found out: a run (its newest checkpoint), a training checkpoint, a Hugging Face folder, a folder of
Meta's, or weights alone as `--format drover` makes them. An interrupted conversion continues when its command is given
again; until it is finished there is nothing at --to, only <to>.partial.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.plugins import add_plugin_option
from pipeline.console import ProgressBar, say
from pipeline.errors import UserError, is_full_disk
from pipeline.formats.meta_params import PARTS
from pipeline.formats.output_folder import OutputFolder
from pipeline.records.weight_files import weights_folder

if TYPE_CHECKING:
    import torch

    from pipeline.formats.base import Weights
    from tools.weights_beside import Beside

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FORMS = ("hf", "meta", "drover")
SHARD_GB = 5.0
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""What a tokenizer of Meta's becomes in a Hugging Face folder."""


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.weights", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, type=Path, metavar="PATH", help="a folder of weights")
    add_plugin_option(parser)
    parser.add_argument("--to", dest="target", required=True, type=Path, metavar="PATH", help="a folder to be made")
    parser.add_argument("--format", required=True, choices=FORMS, help="Hugging Face's, Meta's, or Drover's: weights "
                        "alone, to start a training from")
    parser.add_argument("--dtype", choices=DTYPES, help="default: that of the source")
    parser.add_argument("--shard-gb", type=float, metavar="GB", help=f"largest file, but for a tensor that is larger "
                        f"(default {SHARD_GB:g}); not for meta")
    parser.add_argument("--parts", type=int, choices=PARTS, help="files of a model in Meta's form (default 1)")
    options = parser.parse_args(arguments)
    partial = f"{options.target}.partial"
    try:
        _refuse_senseless(options)
        weights_folder(options.source)  # refuses what is not there, before torch is imported
        import torch

        convert(options.source, options.target, options.format,
                getattr(torch, DTYPES[options.dtype]) if options.dtype else None,
                int((options.shard_gb or SHARD_GB) * 1e9), options.parts or 1)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"\nInterrupted. {partial} keeps what is finished; the same command continues.", file=sys.stderr)
        return 130
    except (OSError, RuntimeError) as error:
        if not is_full_disk(error):
            raise
        print(f"The disk of {partial} is full. It keeps what is finished; make room and give the same command again.",
              file=sys.stderr)
        return 2
    return 0


def _refuse_senseless(options: argparse.Namespace) -> None:
    if options.format == "meta" and options.shard_gb is not None:
        raise UserError("--shard-gb does not go with --format meta, which has a file for each part: take --parts.")
    if options.format != "meta" and options.parts is not None:
        raise UserError(f"--parts goes with --format meta only; asked: {options.format}.")
    if options.shard_gb is not None and not 1e-9 <= options.shard_gb < float("inf"):
        raise UserError(f"--shard-gb must be above 0, not {options.shard_gb}.")


def convert(source: Path, target: Path, form: str, dtype: torch.dtype | None, shard_bytes: int, parts: int) -> None:
    """Make the folder `target` of the weights in `source`, or go on making it.

    Raises:
        UserError: see `open_weights`, `OutputFolder` and `pipeline.formats.writing`; nothing is at the target then.
    """
    import torch

    from pipeline.formats.huggingface import descriptions, shard_files
    from pipeline.formats.weights import open_weights
    from pipeline.formats.writing import drover_files, huggingface_files, meta_files, meta_reads, reader
    from tools.weights_beside import beside

    with open_weights(source) as weights:
        config, found = weights.config, beside(weights)
        kept = reduce(torch.promote_types, {weights.dtype(name) for name in weights.names()})
        dtype = dtype or kept
        say("weights", f"{weights.path} ({weights.form}): {_counted(weights)} in {_spelled(kept)}")
        progress = ProgressBar("weights", f"to {form} in {_spelled(dtype)}", 0, "pieces")
        read = reader(weights, dtype, progress.advance)
        if form == "hf":
            files = huggingface_files(config, dtype, shard_bytes, read)
        elif form == "drover":
            files = drover_files(config, dtype, shard_bytes, read)
        else:
            files = meta_files(config, parts, read)
        progress.total = sum(file.rectangles for file in files)
        texts = descriptions(shard_files(config, dtype, shard_bytes), config, dtype, found.token_ids) \
            if form == "hf" else {}
        made_of = {"from": str(weights.path.resolve()), "format": form, "dtype": _spelled(dtype), "parts": parts,
                   "shard_bytes": shard_bytes, "source": _stamped(weights.path, found)}
        with OutputFolder(target, made_of, config, found.token_ids) as folder:
            with progress:
                for file in files:
                    if not folder.make(file.name, file.write):
                        progress.already(progress.done + file.rectangles)
                        say("weights", f"{file.name} was finished before, and its hash is right")
            for name, text in texts.items():
                if name not in found.files:
                    folder.make(name, _text_writer(text))
            told = _carry(folder, found, form)
            _prove(weights, folder, dtype)
            size = folder.size
            folder.finish()
    count = f"{parts} part{'s' * (parts > 1)}" if form == "meta" else f"{len(files)} files"
    say("weights", f"{target} ({form}): {_counted(weights)} in {_spelled(dtype)}, {count}, {size / 1e6:,.1f} MB. "
        f"{' '.join(told)}")
    if form == "meta" and meta_reads(config, parts).context_length != config.context_length:
        say("weights", f"Meta's params.json has no context length: its readers take "
            f"{meta_reads(config, parts).context_length:,} tokens for this shape; weights.json beside it has the "
            f"{config.context_length:,} of this model, which Drover reads.")


def _carry(folder: OutputFolder, found: Beside, form: str) -> list[str]:
    """Put beside the weights what belongs there; returns sentences about what was carried over and what was not."""
    from pipeline.tokenization.export import CODE, SETTINGS, names_code, settings_text, write_hugging_face
    from tools.weights_beside import MODEL_FILE, name_of_vocabulary

    carried, left, code = [], [], False
    if form == "meta":
        left = sorted(found.files)
    else:
        for name, path in found.files.items():
            write = _copier(path)
            if name == SETTINGS:
                code = names_code(path)
                if code or found.context_length is not None:
                    write = _text_writer(settings_text(path, found.context_length))
            folder.make(name, write)
            carried.append(name)
    if found.vocabulary is not None:
        name = name_of_vocabulary(found.vocabulary, form)
        folder.make(name, _copier(found.vocabulary))
        carried.append(name)
    if form == "hf" and (tokenizer := found.tokenizer):
        for name in TOKENIZER:
            folder.make(name, lambda path: write_hugging_face(tokenizer, path.parent))
        carried += [f"{name} (made of {MODEL_FILE})" for name in TOKENIZER]
    told = [f"Carried over: {', '.join(carried)}." if carried else "No tokenizer was carried over."]
    if form == "hf" and found.vocabulary and not found.tokenizer and TOKENIZER[0] not in found.files:
        told.append(f"No {TOKENIZER[0]} with equal ids can be made of {MODEL_FILE}.")
    if code:
        told.append(f"{SETTINGS} named code ({CODE}), which is left out.")
    return [*told, f"Left behind, as this form has no place for it: {', '.join(left)}."] if left else told


def _prove(weights: Weights, folder: OutputFolder, dtype: torch.dtype) -> None:
    """What was written must open as the same tensors of the same shapes, in the type asked for."""
    from pipeline.formats.weights import open_weights

    with open_weights(folder.partial) as made:
        types = {made.dtype(name) for name in made.names()}
        if made.shapes != weights.shapes or types != {dtype} or made.config.parameter_count != \
                weights.config.parameter_count:
            raise RuntimeError(f"{folder.partial} reads back as {_counted(made)} in {types}, not as "
                               f"{_counted(weights)} in {dtype}: a defect.")


def _counted(weights: Weights) -> str:
    return f"{len(weights.names())} tensors, {weights.config.parameter_count:,} parameters"


def _spelled(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return next((short for short, known in DTYPES.items() if known == name), name)


def _stamped(folder: Path, found: Beside) -> dict[str, list[int]]:
    """The source's files with size and time of change: what an interrupted conversion must find as it was."""
    others = [path for path in (*found.files.values(), found.vocabulary) if path is not None]
    paths = {path.resolve() for path in (*(path for path in folder.iterdir() if path.is_file()), *others)}
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(paths)}


def _copier(source: Path) -> Callable[[Path], Any]:
    return lambda path: shutil.copyfile(source, path)


def _text_writer(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
