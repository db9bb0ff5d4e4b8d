"""Small models with opinions, and the folders that they lie in: a run, a Hugging Face folder."""

import torch

from drover.model.config import ModelConfig
from drover.model.llama import Llama, initialise
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.core.files import write_json
from drover.pipeline.tokenization.conversion import byte_tokenizer, write_hugging_face
from drover.pipeline.tokenization.files import write_record
from tests.formats.cutting import write_checkpoint
from tests.formats.exporting import write_model

TOKENIZER_OF_BYTES = byte_tokenizer()
SHAPE = {"dim": 48, "layers": 2, "heads": 6, "kv_heads": 2, "ffn_dim": 80, "context_length": 128}


def opinionated(config, seed=1):
    """A random model whose next token depends on all that is before it, with scores far enough apart."""
    model = Llama(config)
    initialise(model, config, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_({"tok_embeddings.weight": 10 if config.tied_embeddings else 50,
                                "output.weight": 2}.get(name, 8))
    return model.eval().requires_grad_(False)


def for_tokenizer(tokenizer, seed=1, **changes):
    """Such a model with a row for each id of a tokenizer."""
    return opinionated(ModelConfig(**{**SHAPE, "vocab_size": tokenizer.size, **changes}), seed)


def write_run(folder, models, tokenizer, **settings):
    """A run with a checkpoint of each model, by step, and a tokenizer without a file, unless it is to have none."""
    write_json(folder / "config.yaml", {"name": folder.name, **settings})
    if tokenizer is not None:
        stage = folder / "tokenizer"
        write_hugging_face(tokenizer, stage / "hf")
        write_record(stage, tokenizer)
        Manifest("tokenizer", {}, [], {"vocab_size": tokenizer.size}, "").write(stage)
    for step, model in models.items():
        as_checkpoint(folder / f"train/checkpoints/step-{step:08d}", model, step)
    return folder


def as_checkpoint(folder, model, step=7, kinds=("model", "exp_avg")):
    """A checkpoint as a run writes it: a state of the optimizer beside the weights, `vocab_size` left to the
    tokenizer."""
    records = write_checkpoint(folder, {f"{kind}.{name}": parameter.detach() for name, parameter
                                        in model.named_parameters() for kind in kinds})
    shape = model.config.model_copy(update={"vocab_size": None}).model_dump(mode="json")
    write_json(folder / "COMPLETE.json", {
        "format": 2, "progress": {"step": step}, "files": records, "config": {"model": shape}})
    return folder


def write_huggingface(folder, model, tokenizer):
    """An export with its tokenizer."""
    folder.mkdir(parents=True)
    write_model(folder, model, dtype=torch.float32, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
    write_hugging_face(tokenizer, folder)
    return folder
