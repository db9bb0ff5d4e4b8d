"""A model in memory as a folder in Hugging Face's form; and a pickle that would do something."""

import os

import torch

from drover.pipeline.formats.huggingface import Source, huggingface_files, write_folder
from drover.pipeline.formats.weights import open_weights


def write_model(folder, model, **options):
    """Write a folder of weights that lie in memory."""
    write_state(folder, model.state_dict(), model.config, **options)


def write_state(folder, state, config, *, dtype=torch.float32, bos_id=1, eos_id=2, max_shard_bytes=5_000_000_000):
    """The same for a mapping of tensors by name."""
    write_folder(folder, huggingface_files(Source(config, dtype, lambda name: state[name]), max_shard_bytes,
                                           {"bos_token_id": bos_id, "eos_token_id": eos_id}))


def state_in(folder):
    """The config and the state dict of a folder of weights."""
    with open_weights(folder) as weights:
        state = {name: weights.read(name) for name in weights.shapes}
        if weights.config.tied_embeddings:
            state["output.weight"] = state["tok_embeddings.weight"]
        return weights.config, state


class Hostile:
    """Makes a folder when it is unpickled by anything that calls what a pickle names."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
