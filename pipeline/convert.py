"""Stage 5: the trained weights as a Hugging Face folder that transformers loads, proven before it counts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script: find the packages, and shadow no library with a file beside this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from pipeline.entry import stage_main
from pipeline.errors import UserError
from pipeline.files import output_record, sync
from pipeline.work import Work

LARGEST_DIFFERENCE = 1e-4
"""Of the logits in fp32, between the training model and what transformers loads."""


def convert(work: Work) -> None:
    """Write `hf/` beside its final place, load it back with transformers, compare, then rename it."""
    import torch

    from pipeline.formats.huggingface import write_folder
    from pipeline.training.checkpoint import load_weights, read_marker

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
    dtype = getattr(torch, settings.dtype)
    # What is compared below is what is exported: rounding to bf16 is the user's wish, not a difference to find.
    weights = {name: tensor.to(dtype).float() for name, tensor in load_weights(checkpoint).items()}
    write_folder(temporary, weights, config, dtype=dtype, bos_id=tokenizer.counts["bos_id"],
                 eos_id=tokenizer.counts["eos_id"], max_shard_bytes=int(settings.max_shard_mb * 1e6))
    for path in sorted((tokenizer_folder / "hf").iterdir()):
        shutil.copyfile(path, temporary / path.name)
    counts = _prove(work, temporary, config, weights)
    for path in temporary.iterdir():
        sync(path)
    temporary.rename(final)
    sync(work.folder)
    outputs = [output_record(work.folder, path) for path in sorted(final.iterdir())]
    work.commit(outputs, {**counts, "parameters": trained.counts["parameters"], "dtype": settings.dtype,
                          "checkpoint": checkpoint.name})


def _prove(work: Work, folder: Path, config: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Load the folder as a user would; compare logits with the training model, and ids with the vocabulary.

    Empties `weights` on the way.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from model.llama import Llama

    disable_progress_bar()
    ids, texts = _heldout(work)
    # One model at a time, and ours without a copy of the weights: an 8B model in fp32 is 32 GB.
    with torch.device("meta"):
        model = Llama(config)
    model.load_state_dict(weights, assign=True)
    with torch.no_grad():
        ours = model.eval()(ids)
        del model
        weights.clear()
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits.float()
    difference = float((ours - theirs).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(f"The exported model in {folder} does not compute what the training model does: logits differ "
                        f"by {difference:.2e} (limit {LARGEST_DIFFERENCE:.0e}) on {ids.numel()} held-out tokens. "
                        f"This is a defect of the export or of the installed transformers; nothing was committed.")
    tokenizer, vocabulary = AutoTokenizer.from_pretrained(folder), _vocabulary(work)
    wrong = [text for text in texts if tokenizer.encode(text, add_special_tokens=False) != vocabulary.encode(text)]
    if wrong:
        raise UserError(f"The exported tokenizer in {folder} gives other ids than training used on {len(wrong)} of "
                        f"{len(texts)} held-out documents, first: {wrong[0][:80]!r}. Nothing was committed.")
    work.say(f"transformers loads it: logits differ by at most {difference:.1e} on {ids.numel()} held-out tokens, "
             f"token ids are equal on {len(texts)} held-out documents")
    return {"largest_logit_difference": difference, "tokens_compared": ids.numel(), "documents_compared": len(texts)}


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
