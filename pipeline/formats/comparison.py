"""Compare an exported folder with the checkpoint: config, every tensor, and the logits of transformers.

Two float32 programs differ by rounding. The difference depends on the weights: 1e-6 in the logits of a small new model,
1e-3 and more if the model is confident. So neither is the reference. Both are compared with a float64 forward pass of
the checkpoint's weights, which does not use the export. The yardstick is the error of single precision itself.

The programs run one forward pass side by side, one part of the network after the other. Only the weights of the current
part are in memory, also in transformers' network. The output of each part is compared and passed to the next. So all
layers of a model of any size are compared, and its weights are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drover.model.config import ModelConfig
from drover.model.llama import Llama, ModelPart
from drover.model.names import EMBEDDING, NORM, OUTPUT, parameter_shapes, their_name
from drover.model.rope import RotaryTable
from drover.pipeline.config.loading import read_shape
from drover.pipeline.core.console import quiet_imports
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.formats.huggingface import Read
from drover.pipeline.formats.interface import Weights
from drover.pipeline.formats.weights import HuggingFaceWeights, same_bits


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


FACTOR = 10.0
"""Allowed error of both sides, as a multiple of single precision's own error. Correct programs that add in another
order stay below 4 (logits up to 96, contexts up to 4,096, measured); a wrong weight or layout is off by thousands."""

_DEFECT = "This is a defect of the export, of the disk or of the installed transformers; nothing was committed."


def compare_folder(folder: Path, config: ModelConfig, read: Read) -> int:
    """Open an export as a reader would, and compare its config and every tensor. Returns the number of tensors.

    Args:
        read: reads one weight of the checkpoint, rounded to the type of the export.

    Raises:
        UserError: naming every value in which config.json is not the network that was trained, or the tensor that is
            missing, unknown, of another shape, or holds another value.
    """
    try:
        result = read_shape(folder / "config.json")
        if wrong := [f"{name} is {other!r}; trained with {own!r}"
                     for name, (own, other) in config.differences(result).items()]:
            raise UserError(f"The config.json in {folder} is not that of the model that was trained: {listed(wrong)}.")
        with HuggingFaceWeights(folder) as made:
            prove_equal(made, read)
            return len(made.shapes)
    except UserError as error:
        raise UserError(f"{error} {_DEFECT}") from None


def prove_equal(made: Weights, read: Read) -> None:
    """Read every tensor of a folder back, one at a time. UserError unless each is, bit for bit, what `read` gives."""
    for name in made.shapes:
        if (problem := _difference(made.read(name), read(name))) is not None:
            raise UserError(f"{name} in the exported model in {made.path} is not what the checkpoint holds: {problem}.")


def _difference(actual: Tensor, expected: Tensor) -> str | None:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"it is {tuple(actual.shape)} of {actual.dtype}, not {tuple(expected.shape)} of {expected.dtype}"
    if same_bits(actual, expected):
        return None
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    places = (actual.view(bits) != expected.view(bits)).nonzero()
    first = tuple(places[0].tolist())
    return (f"{len(places):,} of {actual.numel():,} values differ, the first at {list(first)}: "
            f"{float(actual[first])!r} instead of {float(expected[first])!r}")


@dataclass(frozen=True)
class Agreement:
    """How far the training model and transformers, in float32, are from a float64 forward pass of the checkpoint.

    Attributes:
        tokens_compared, layers_compared: on what.
        largest_logit: of the float64 pass, by magnitude.
        training_logit_error, transformers_logit_error: largest difference of a logit from the float64 pass.
        single_precision_logit_error: the same of our network wholly in single precision, rotary angles too, as
            transformers computes them; at least float32's resolution at the largest logit. The yardstick.
        argmax_equal, argmax_decided: tokens where both sides have the float64 pass's argmax; tokens where the lead of
            that argmax is beyond rounding, so that both must have it.
        factor: allowed multiple of single precision's own error.
    """

    tokens_compared: int
    layers_compared: int
    largest_logit: float
    training_logit_error: float
    transformers_logit_error: float
    single_precision_logit_error: float
    argmax_equal: int
    argmax_decided: int
    argmax_wrong: int
    factor: float = FACTOR

    @property
    def problems(self) -> list[str]:
        """Differences beyond rounding, as sentences; empty for a correct export. NaN is beyond everything."""
        resolution = self.largest_logit * torch.finfo(torch.float32).eps
        single = self.single_precision_logit_error
        problems = [f"{what} are off by up to {error:.1e}, where {whose} off by {known:.1e} (logits up to "
                    f"{self.largest_logit:.1f})" for what, error, whose, known in (
            ("transformers' logits", self.transformers_logit_error, "float32 is", single),
            ("the training model's logits", self.training_logit_error, "float32 is", single),
            ("the training model's logits", self.training_logit_error, "transformers' are",
             max(self.transformers_logit_error, resolution))) if not error <= self.factor * known]
        if self.argmax_wrong:
            problems.append(f"the argmax differs on {self.argmax_wrong} of {self.argmax_decided} tokens where rounding "
                            f"cannot change it")
        return problems


def compare_logits(folder: Path, config: ModelConfig, read: Read, tokens: Tensor) -> Agreement:
    """Compare the float32 logits of transformers and of the training model with a float64 pass of the checkpoint.

    They go through the network together, and have one part of it in memory at a time: 16 bytes per parameter of the
    largest layer or embedding. transformers reads only the export, the training model only the checkpoint.

    Args:
        folder: the export, in Hugging Face's format.
        read: reads one weight of the checkpoint, rounded to the export's type, so that this rounding is no difference.
        tokens: (1, length) int64.

    Raises:
        UserError: with the differences beyond rounding, and the first part of the network that differs.
    """
    ours = _Passes(config, read, tokens)
    theirs, absent = transformers_pass(folder, tokens, ours.step)
    if absent:
        raise UserError(f"transformers does not find {', '.join(absent[:8])} in {folder}. {_DEFECT}")
    reference, training, single = (ours.outputs[kind] for kind in ("exact", "training", "single"))
    if not bool(reference.isfinite().all()):
        raise UserError(f"The model that was trained has logits that are NaN or infinite on {tokens.numel()} tokens, "
                        f"even in float64, so its export cannot be compared. Convert an earlier checkpoint, or "
                        f"search its weights for NaN.")
    result = agreement(reference, training, theirs, single, config.layers)
    if result.problems:
        where = ours.parting or ("No part of transformers' model differs by more than rounding: check the training "
                                 "model.")
        raise UserError(f"The exported model in {folder} does not compute what the training model does, compared with "
                        f"a float64 forward pass of the checkpoint on {tokens.numel()} tokens:\n"
                        f"{listed(result.problems)}\n{where} {_DEFECT}")
    return result


class _Passes:
    """The checkpoint's passes: exact, the training model's, and entirely in single precision. They compute each part
    after transformers.

    Attributes:
        outputs: of each pass's last part.
        parting: a sentence with the first part in which transformers differs by more than rounding; None if none does.
    """

    def __init__(self, config: ModelConfig, read: Read, tokens: Tensor) -> None:
        self.config, self.read, self.tokens = config, read, tokens
        self._kinds = {"exact": (torch.float64, RotaryTable(config)), "training": (torch.float32, RotaryTable(config)),
                       "single": (torch.float32, SingleAngles(config))}
        self.outputs: dict[str, Tensor] = {}
        self.parting: str | None = None
        self._normed: Tensor | None = None  # transformers', until ours is there

    def step(self, name: str, theirs: Tensor) -> None:
        """Compute a part, and compare. theirs: the output of transformers' part with this name."""
        if name == "norm":
            self._normed = theirs
            return
        weights = read_part(self.config, name, self.read)
        result = dict[str, dict[str, Tensor]]()
        for kind, (dtype, table) in self._kinds.items():
            result[kind] = our_part(self.config, name, weights, dtype, table, self.tokens, self.outputs.get(kind))
            self.outputs[kind] = result[kind][name]
        for part, output in (("norm", self._normed), (name, theirs)):
            if output is not None:
                self._judge(part, output, result["exact"][part], result["single"][part])

    def _judge(self, name: str, theirs: Tensor, exact: Tensor, single: Tensor) -> None:
        size, off = float(exact.abs().max()), _error(theirs, exact)
        resolution = size * torch.finfo(torch.float32).eps
        if self.parting is None and not off <= FACTOR * max(_error(single, exact), resolution):
            self.parting = f"They agree before {name}; after it values up to {size:.2g} differ by {off:.1e}."


def agreement(reference: Tensor, ours: Tensor, theirs: Tensor, single: Tensor, layers: int) -> Agreement:
    """The figures of `Agreement`.

    Args:
        reference: float64 logits, (1, length, vocabulary).
        ours, theirs, single: float32 logits of the training model, of transformers, and entirely in single precision.
    """
    largest = float(reference.abs().max())
    resolution = largest * torch.finfo(torch.float32).eps
    single_error = max(_error(single, reference), resolution)
    best, second = reference.topk(2, dim=-1).values.unbind(-1)
    decided = best - second > 2 * FACTOR * single_error
    likeliest = reference.argmax(-1)
    equal = (theirs.argmax(-1) == likeliest) & (ours.argmax(-1) == likeliest)
    return Agreement(
        tokens_compared=likeliest.numel(), layers_compared=layers, largest_logit=largest,
        training_logit_error=_error(ours, reference), transformers_logit_error=_error(theirs, reference),
        single_precision_logit_error=single_error, argmax_equal=int(equal.sum()), argmax_decided=int(decided.sum()),
        argmax_wrong=int((decided & ~equal).sum()))


def _error(actual: Tensor, reference: Tensor) -> float:
    return float((actual.double() - reference.double()).abs().max()) if actual.numel() else 0.0


class SingleAngles(RotaryTable):
    """Rotary angles in float32, as other programs compute them: at position 1,000 they are off by up to 3e-5."""

    precision = torch.float32
