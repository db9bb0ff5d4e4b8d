"""Stage 5, convert: export the trained weights as a Hugging Face folder that transformers loads, and verify it."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from drover.model.huggingface import config_to_json, shape_of
from drover.pipeline.contract.state import clear
from drover.pipeline.core.console import counted
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record, publish, sync, write_text

if TYPE_CHECKING:
    from torch import Tensor

    from drover.model.config import ModelConfig
    from drover.pipeline.config.tree import Config
    from drover.pipeline.contract.inputs import Expected
    from drover.pipeline.contract.stage_work import Work
    from drover.pipeline.formats.huggingface import Read
    from drover.pipeline.tokenization.tokenizer import Tokenizer

CHECKED_TOKENS = 512
"""How many validation tokens are compared. A float64 forward pass of the checkpoint is the reference for transformers
with the export, and for the training model: logits and argmax tokens."""


def problems(config: Config) -> list[str]:
    """Why the network cannot be exported, before it is trained: fields that its config.json does not hold."""
    model = config.model.with_vocabulary(config.model.vocab_size or 1)
    lost = model.differences(shape_of(config_to_json(model, "float32")))
    return [f"model.{' and model.'.join(lost)} cannot be exported: a Llama's config.json has no such key. To train the "
            f"network without an export, request the stages up to train (--stage shard,tokenizer,encode,train)."
            ] if lost else []


def convert(work: Work) -> None:
    """Make the folder unless that is done, and upload it to `convert.copy_to`."""
    from drover.pipeline.storage.mirror import copy_export

    if work.run.manifest(work.name) is None:
        _convert(work)
    if work.config.convert.copy_to is not None:
        copy_export(work.config.convert.copy_to, work.config.name, work.folder, work.run.finished(work.name), work.say)
        clear(work.folder, work.run.finished(work.name))


def _convert(work: Work) -> None:
    """Write `hf.tmp/`, load it with transformers, compare, then rename it to `hf/`.

    Weights go from the checkpoint's pieces to the export one tensor at a time, with every training engine.
    """
    import torch

    from drover.pipeline.data.remote_tokens import download_shards, recorded_shards
    from drover.pipeline.data.token_shards import ShardTable
    from drover.pipeline.formats.huggingface import Source, huggingface_files, write_folder
    from drover.pipeline.formats.weights import MeanWeights, reader
    from drover.pipeline.records.checkpoints import CHECKPOINTS, checkpoint_name, read_marker
    from drover.pipeline.records.weight_files import FILE, read_settings
    from drover.pipeline.tokenization.files import MODEL_FILE, SETTINGS, settings_text
    from drover.pipeline.tokenization.tokenizer import load_tokenizer

    train_folder, trained = work.input("train")
    tokenizer_folder, tokenizer = work.input("tokenizer")
    checkpoint = train_folder / trained.counts["checkpoint"]
    read_marker(checkpoint)
    table = ShardTable.of(work.input("encode")[1].outputs)
    split = "validation" if len(table.rows("validation")) else "train"
    download_shards(work, table, table.rows(split).tolist())
    work.check([*work.committed("tokenizer"), *work.committed(
        "train", chosen=lambda record: record["path"] == FILE or record["path"].startswith(
            f"{trained.counts['checkpoint']}/")), *recorded_shards(work, table, table.rows("validation").tolist())])
    others = [train_folder / CHECKPOINTS / checkpoint_name(step) for step in work.config.convert.average]
    work.check([expected for other in others if other != checkpoint for expected in _files_of(other)])
    config = work.config.model.model_copy(update={"vocab_size": trained.counts["vocab_size"]})
    settings = work.config.convert
    dtype = getattr(torch, settings.dtype)
    temporary, final = work.folder / "hf.tmp", work.folder / "hf"
    for folder in (temporary, final):
        if folder.exists():
            shutil.rmtree(folder)
    temporary.mkdir(parents=True)
    named = f"the mean of {', '.join(other.name for other in others)}" if others else checkpoint.name
    work.say(f"{named}: {trained.counts['parameters']:,} parameters as {settings.dtype}")
    with MeanWeights(others or [checkpoint], config) as weights:
        read = reader(weights, dtype)
        generation = read_settings(train_folder / FILE)
        ids = {"bos_token_id": tokenizer.counts["bos_id"],
               "eos_token_id": generation.get("eos_token_id", tokenizer.counts["eos_id"]),
               **{name: generation[name] for name in ("pad_token_id",) if name in generation}}
        write_folder(temporary, huggingface_files(Source(config, dtype, read), int(settings.max_shard_mb * 1e6), ids,
                                                  generation))
        vocabulary = load_tokenizer(tokenizer_folder)
        copied = sorted((tokenizer_folder / "hf").iterdir())
        # llama.cpp reads the scores of merges from it. It would also read a unigram model's scores as such.
        if vocabulary.kind == "sentencepiece" and vocabulary.model == "BPE":
            copied.append(tokenizer_folder / MODEL_FILE)
        for path in copied:
            shutil.copyfile(path, temporary / path.name)
        if (tokenizer_settings := temporary / SETTINGS).is_file():
            write_text(tokenizer_settings, settings_text(tokenizer_settings, config.context_length))
        counts = _prove(work, temporary, config, read, vocabulary, split)
    for path in temporary.iterdir():
        sync(path)
    publish(temporary, final)
    outputs = [output_record(work.folder, path) for path in sorted(final.iterdir())]
    work.commit(outputs, {**counts, "parameters": trained.counts["parameters"], "dtype": settings.dtype,
                          "checkpoint": checkpoint.name,
                          **({"averaged": [other.name for other in others]} if others else {})})


def _files_of(checkpoint: Path) -> list[Expected]:
    """The files of a checkpoint to be averaged, from its own marker; UserError if it is not complete."""
    from drover.pipeline.contract.inputs import Expected
    from drover.pipeline.records.checkpoints import complete_checkpoints, step_of, valid_marker

    if (marker := valid_marker(checkpoint)) is None:
        there = ", ".join(str(step_of(path)) for path in complete_checkpoints(checkpoint.parent.parent))
        raise UserError(f"convert.average names step {step_of(checkpoint)}, but {checkpoint.parent} has no complete "
                        f"checkpoint of it (there are those of {there or 'none'}). Training saves after the steps of "
                        f"convert.average only if the setting is there before. Name steps that exist, or train again.")
    return [Expected(checkpoint / record["path"], record["sha256"], "is not what training saved",
                     "Restore the right file, or leave its step out of convert.average") for record in marker.files]


def _prove(work: Work, folder: Path, config: ModelConfig, read: Read, tokenizer: Tokenizer,
           split: str) -> dict[str, object]:
    """Verify the folder. Config and tensors must equal the checkpoint's, token ids those of the vocabulary, and
    transformers must compute logits as close to exact arithmetic as single precision allows. split: of the text."""
    from drover.pipeline.formats.comparison import compare_folder, compare_logits
    from drover.pipeline.parallel.host_memory import always_return_freed_memory

    compared = compare_folder(folder, config, read)
    work.say(f"{compared} tensors read back are the checkpoint's, bit for bit")
    ids, texts = _text(work, tokenizer, split)
    always_return_freed_memory()
    result = compare_logits(folder, config, read, ids)
    work.say(f"transformers agrees within rounding: argmax equal on {result.argmax_equal} of "
             f"{result.tokens_compared} tokens")
    return {**asdict(result), "tensors_compared": compared, **_compare_tokens(work, tokenizer, folder, texts)}


def _compare_tokens(work: Work, tokenizer: Tokenizer, folder: Path, texts: list[str]) -> dict[str, object]:
    """UserError unless the exported tokenizer gives the ids that training used."""
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    wrong = [text for text in texts if exported.encode(
        text, add_special_tokens=False, split_special_tokens=True, verbose=False) != tokenizer.encode(text)]
    if wrong:
        raise UserError(f"The exported tokenizer in {folder} gives other ids than training used on {len(wrong)} of "
                        f"{len(texts)} validation documents, first: {wrong[0][:80]!r}. Nothing was committed. Please "
                        f"report it.")
    work.say(f"token ids are equal on {counted(len(texts), 'validation document')}")
    return {"documents_compared": len(texts)}


def _text(work: Work, tokenizer: Tokenizer, split: str) -> tuple[Tensor, list[str]]:
    """Text for the comparison: a window of tokens (1, length) of a split, and the texts of their documents."""
    import torch

    from drover.pipeline.data.remote_tokens import shards_of

    length = min(CHECKED_TOKENS, work.config.model.context_length)
    ids = list[int]()
    texts = list[str]()
    for shard in (shard for own in shards_of(work, split).values() for shard in own):
        for index in range(min(shard.documents, 50)):
            tokens = shard.document_tokens(index).tolist()
            ids += tokens
            texts.append(tokenizer.decode(tokens[1:-1]))
    return torch.tensor([ids[:length]]), texts


if __name__ == "__main__":
    from drover.pipeline.contract.entry import stage_main

    sys.exit(stage_main("convert", convert))
