"""Stage 5: the trained weights as a Hugging Face folder that transformers loads, proven before it counts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.entry import stage_main
from pipeline.errors import UserError
from pipeline.files import output_record, sync
from pipeline.work import Work

if TYPE_CHECKING:
    from model.config import ModelConfig
    from pipeline.formats.checkpoint import CheckpointReader

PREFIX = "model."
"""Of the names of weights in a checkpoint."""
LARGEST_DIFFERENCE = 1e-4
"""Of the logits in fp32, between the training model and what transformers loads."""


def convert(work: Work) -> None:
    """Write `hf/` beside its final place, load it back with transformers, compare, then rename it.

    Weights go from the checkpoint's pieces to the export one tensor at a time, whatever engine trained them.
    """
    import torch

    from pipeline.formats.checkpoint import CheckpointReader
    from pipeline.formats.huggingface import stream_folder
    from pipeline.training.checkpoint import read_marker

    train_folder, trained = work.input("train")
    tokenizer_folder, tokenizer = work.input("tokenizer")
    checkpoint = train_folder / trained.counts["checkpoint"]
    read_marker(checkpoint)
    config = work.config.model.model_copy(update={"vocab_size": trained.counts["vocab_size"]})
    settings = work.config.convert
    temporary, final = work.folder / "hf.tmp", work.folder / "hf"
    for folder in (temporary, final):
        if folder.exists():
            shutil.rmtree(folder)
    temporary.mkdir(parents=True)
    work.say(f"{checkpoint.name}: {trained.counts['parameters']:,} parameters as {settings.dtype}")
    with CheckpointReader(checkpoint) as reader:
        shapes = {name.removeprefix(PREFIX): reader.shape(name) for name in reader.names(PREFIX)}
        stream_folder(temporary, shapes, lambda name: reader.read(PREFIX + name), config,
                      dtype=getattr(torch, settings.dtype), bos_id=tokenizer.counts["bos_id"],
                      eos_id=tokenizer.counts["eos_id"], max_shard_bytes=int(settings.max_shard_mb * 1e6))
        for path in sorted((tokenizer_folder / "hf").iterdir()):
            shutil.copyfile(path, temporary / path.name)
        counts = _prove(work, temporary, config, reader)
    for path in temporary.iterdir():
        sync(path)
    temporary.rename(final)
    sync(work.folder)
    outputs = [output_record(work.folder, path) for path in sorted(final.iterdir())]
    work.commit(outputs, {**counts, "parameters": trained.counts["parameters"], "dtype": settings.dtype,
                          "checkpoint": checkpoint.name})


def _prove(work: Work, folder: Path, config: ModelConfig, reader: CheckpointReader) -> dict[str, Any]:
    """Load the folder as a user would; compare logits with the training model, tensors with the checkpoint, ids with
    the vocabulary."""
    ids, texts = _heldout(work)
    return {**_compare_logits(work, folder, config, reader, ids), **_compare_tensors(work, folder, config, reader),
            **_compare_tokens(work, folder, texts)}


def _compare_logits(work: Work, folder: Path, config: ModelConfig, reader: CheckpointReader,
                    ids: Any) -> dict[str, Any]:
    """The same logits from transformers as from the training model, with as many layers as fit into memory."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from model.llama import Llama

    disable_progress_bar()
    set_verbosity_error()  # of a model of fewer layers, the others' weights are reported as left over
    layers = layers_that_fit(config, work.config.convert.check_memory_gb * 1e9)
    # One model at a time, and ours without a copy of the weights: an 8B model in fp32 is 32 GB.
    with torch.device("meta"):
        model = Llama(config.model_copy(update={"layers": layers}))
    # What is compared is what is exported: rounding to bf16 is the user's wish, not a difference to find.
    dtype = getattr(torch, work.config.convert.dtype)
    state = {name: reader.read(PREFIX + name).to(dtype).float() for name, _ in model.named_parameters()}
    if config.tied_embeddings:
        state["output.weight"] = state["tok_embeddings.weight"]
    model.load_state_dict(state, assign=True)
    del state
    with torch.no_grad():
        ours = model.eval()(ids)
        del model
        found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, num_hidden_layers=layers,
                                                          output_loading_info=True)
        loaded, report = found
        theirs = loaded.eval()(ids).logits.float()
    difference = float((ours - theirs).abs().max())
    if report["missing_keys"] or report["mismatched_keys"] or not difference <= LARGEST_DIFFERENCE:
        raise UserError(f"The exported model in {folder} does not compute what the training model does: logits differ "
                        f"by {difference:.2e} (limit {LARGEST_DIFFERENCE:.0e}) on {ids.numel()} held-out tokens. "
                        f"This is a defect of the export or of the installed transformers; nothing was committed.")
    work.say(f"transformers loads it: logits differ by at most {difference:.1e} on {ids.numel()} held-out tokens "
             f"({layers} of {config.layers} layers)")
    return {"largest_logit_difference": difference, "tokens_compared": ids.numel(), "layers_compared": layers}


def layers_that_fit(config: ModelConfig, memory: float) -> int:
    """How many layers of a model, with its embedding and output matrices, take at most `memory` bytes in float32.

    At least one.
    """
    one = config.model_copy(update={"layers": 1}).parameter_count
    layer = config.model_copy(update={"layers": 2}).parameter_count - one
    return max(1, min(config.layers, 1 + int((memory / 4 - one) // layer)))


def _compare_tensors(work: Work, folder: Path, config: ModelConfig, reader: CheckpointReader) -> dict[str, Any]:
    """Read every exported tensor back; it must be the checkpoint's, rounded to the type of the export."""
    import torch

    from pipeline.formats.huggingface import read_tensors

    dtype, compared = getattr(torch, work.config.convert.dtype), 0
    for name, tensor in read_tensors(folder, config):
        if name == "output.weight" and config.tied_embeddings:
            continue
        if not torch.equal(tensor, reader.read(PREFIX + name).to(dtype)):
            raise UserError(f"{name} in the exported model in {folder} is not what the checkpoint {reader.folder} "
                            f"holds. This is a defect of the export or of the disk; nothing was committed.")
        compared += 1
    work.say(f"{compared} tensors read back are the checkpoint's, bit for bit")
    return {"tensors_compared": compared}


def _compare_tokens(work: Work, folder: Path, texts: list[str]) -> dict[str, Any]:
    """The exported tokenizer must give the ids that training used."""
    from transformers import AutoTokenizer

    tokenizer, vocabulary = AutoTokenizer.from_pretrained(folder), _vocabulary(work)
    wrong = [text for text in texts if tokenizer.encode(text, add_special_tokens=False) != vocabulary.encode(text)]
    if wrong:
        raise UserError(f"The exported tokenizer in {folder} gives other ids than training used on {len(wrong)} of "
                        f"{len(texts)} held-out documents, first: {wrong[0][:80]!r}. Nothing was committed.")
    work.say(f"token ids are equal on {len(texts)} held-out documents")
    return {"documents_compared": len(texts)}


def _heldout(work: Work) -> tuple[Any, list[str]]:
    """Real text to compare on: a window of held-out tokens (1, length), and the documents they come from."""
    import torch

    from pipeline.data.token_shards import open_shards

    folder, manifest = work.input("encode")
    length = min(work.config.convert.check_tokens, work.config.model.context_length)
    found, texts, vocabulary = [], [], _vocabulary(work)
    for shard in (shard for source in work.config.shard.sources
                  for shard in open_shards(folder, manifest.outputs, "heldout", source.name)):
        for index in range(min(shard.documents, 50)):
            tokens = shard.document_tokens(index).tolist()
            found += tokens
            texts.append(vocabulary.decode(tokens[1:-1]))
    return torch.tensor([found[:length]]), texts


def _vocabulary(work: Work) -> Any:
    from pipeline.vocabulary.kinds import load_vocabulary
    return load_vocabulary(work.input("tokenizer")[0])


if __name__ == "__main__":
    sys.exit(stage_main("convert", convert))
