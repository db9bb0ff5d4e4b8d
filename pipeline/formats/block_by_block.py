"""Run one forward pass in several programs side by side, one part of the network after the other.

Only the weights of the current part are in memory, also in transformers' network. The output of each part is compared
and passed to the next. So all layers of a model of any size are compared, and its weights are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drover.model.config import ModelConfig
from drover.model.llama import Llama, ModelPart
from drover.model.names import EMBEDDING, NORM, OUTPUT, parameter_shapes, their_name
from drover.model.rope import RotaryTable
from drover.pipeline.core.console import quiet_imports
from drover.pipeline.formats.weights import HuggingFaceWeights

Read = Callable[[str], Tensor]
"""Reads one of the checkpoint's weights by our name, rounded to the type of the export."""


def read_part(config: ModelConfig, name: str, read: Read) -> dict[str, Tensor]:
    """The weights of a part of the network (tok_embeddings, layers.0 ..., and output, which is the norm with the output
    matrix), by our names; a tied output matrix is the embedding."""
    if name == "output":
        return {NORM: read(NORM), OUTPUT: read(EMBEDDING if config.tied_embeddings else OUTPUT)}
    return {key: read(key) for key in parameter_shapes(config) if key.startswith(f"{name}.")}


@torch.no_grad()
def our_part(config: ModelConfig, name: str, weights: Mapping[str, Tensor], dtype: torch.dtype, table: RotaryTable,
             tokens: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
    """`Llama`'s own forward pass of one part, without gradients. Returns outputs by name, the last part's norm also.

    Args:
        dtype: of weights and arithmetic, float32 or float64.
        table: the rotary angles.
        tokens: (1, length) int64.
        hidden: output of the part before, (1, length, dim); None for the first.
    """
    count = config.layers
    # The part with the last layer would predict: pretend that another layer follows.
    part = ModelPart(range(0), count + 1) if name == "tok_embeddings" else ModelPart(range(count, count), count)
    if name.startswith("layers."):
        layer = int(name.removeprefix("layers."))
        part = ModelPart(range(layer, layer + 1), count + 1)
    with torch.device("meta"):
        model = Llama(config, part).eval()
    model.rotary_table = table
    # If a weight is missing here, the forward pass fails on the meta device.
    model.load_state_dict({key: weight.to(dtype) for key, weight in weights.items()}, strict=False, assign=True)
    result: dict[str, Tensor] = {}
    if name == "output":
        model.norm.register_forward_hook(lambda module, inputs, output: result.update(norm=output))
    result[name] = model(tokens, hidden=hidden)
    return result


@torch.no_grad()
def transformers_pass(folder: Path, tokens: Tensor, after: Callable[[str, Tensor], None]) -> tuple[Tensor, list[str]]:
    """Run an export in transformers, in float32. Returns its logits, and the weights that it does not find.

    Its network is built without weights. Each part gets its weights from the files, by transformers' names and shapes,
    just before it computes, and loses them after.

    Args:
        folder: in Hugging Face's format.
        tokens: (1, length) int64.
        after: called with the name and the output of each part: tok_embeddings, layers.0 ..., norm, output.
    """
    with quiet_imports():
        from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils  # noqa: F401 - imports torchao
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    with HuggingFaceWeights(folder) as weights:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False),
                                                          trust_remote_code=False).float()
        tied = their_name(OUTPUT) if weights.config.tied_embeddings else ""
        if absent := [name for name, wanted in model.state_dict().items()
                      if name != tied and weights.stored_shape(name) != tuple(wanted.shape)]:
            return torch.empty(0), absent
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its angles are not stored
        _stream(_their_parts(model), model, weights, after)
        return model.eval()(tokens).logits.float(), []


def _their_parts(model: Any) -> dict[str, nn.Module]:
    """The parts of transformers' network by our names, in their order."""
    return {"tok_embeddings": model.model.embed_tokens,
            **{f"layers.{number}": layer for number, layer in enumerate(model.model.layers)},
            "norm": model.model.norm, "output": model.lm_head}


def _stream(parts: Mapping[str, nn.Module], model: nn.Module, weights: HuggingFaceWeights,
            after: Callable[[str, Tensor], None]) -> None:
    """Load each part's weights before it computes, by transformers' names, and drop them after. Then call `after` with
    its output."""
    prefixes = {module: name for name, module in model.named_modules()}

    def load(module: nn.Module, _: Any, prefix: str) -> None:
        module.load_state_dict({key: weights.stored(f"{prefix}.{key}").float() for key in module.state_dict()},
                               assign=True)

    def drop(module: nn.Module, inputs: Any, output: Any, name: str) -> None:
        module.to("meta")
        after(name, output[0] if isinstance(output, tuple) else output)
    for name, part in parts.items():
        owner = "tok_embeddings" if name == "output" and weights.config.tied_embeddings else name
        part.register_forward_pre_hook(partial(load, prefix=prefixes[parts[owner]]))
        part.register_forward_hook(partial(drop, name=name))
