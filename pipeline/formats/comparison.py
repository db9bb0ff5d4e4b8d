"""Whether an exported folder is the checkpoint's model: its config, every tensor, and what transformers computes of it.

Two float32 programs differ by rounding, and how much depends on the weights: logits of a small, fresh model by 1e-6, of
a sharp one by 1e-3 and more. So neither is taken as the truth. Both are compared with a float64 forward pass of the
checkpoint's weights, which never sees the export, and with what single precision itself is off there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.llama import Llama
from model.rope import RotaryTable, Rotation, rotary_frequencies
from pipeline.errors import UserError, listed
from pipeline.formats.huggingface import read_config, read_tensors

FACTOR = 10.0
"""How many times single precision's own error either side may be off. Correct programs that add in another order stay
below 4 (measured for logits up to 96, contexts up to 4,096); a wrong weight or layout is off by many thousands."""

_DEFECT = "This is a defect of the export, of the disk or of the installed transformers; nothing was committed."

Read = Callable[[str], Tensor]
"""One of the checkpoint's weights by our name, rounded to the type of the export."""

SHAPE = ("dim", "layers", "heads", "kv_heads", "hidden", "vocab_size", "context_length", "rope_theta", "rope_scaling",
         "norm_eps", "tied_embeddings", "qk_norm", "layer_kinds")
"""What of a ModelConfig a config.json says; `hidden` stands for the three ways to give the feed-forward width."""


def compare_config(folder: Path, config: ModelConfig) -> None:
    """UserError naming every value in which config.json, read back, is not the network that was trained."""
    try:
        found = read_config(folder)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise UserError(f"The config.json in {folder} cannot be read back: {str(error).rstrip('.')}. "
                        f"{_DEFECT}") from error
    wrong = [f"{name} is {getattr(found, name)!r}; trained with {getattr(config, name)!r}" for name in SHAPE
             if getattr(found, name) != getattr(config, name)]
    if wrong:
        raise UserError(f"The config.json in {folder} is not that of the model that was trained: {listed(wrong)}. "
                        f"{_DEFECT}")


def compare_tensors(folder: Path, config: ModelConfig, names: list[str], read: Read) -> int:
    """Read every exported tensor back, one at a time; how many there are.

    Each must be the checkpoint's, rounded to the type of the export, bit for bit.

    Args:
        names: of all weights of the checkpoint; a tied matrix once.

    Raises:
        UserError: naming the tensor that is missing, unknown, of another shape, or holds another value.
    """
    expected = set(names) - ({"output.weight"} if config.tied_embeddings else set())
    missing = set(expected)
    try:
        for name, tensor in read_tensors(folder, config):
            if name == "output.weight" and config.tied_embeddings:
                continue
            if (problem := _difference(tensor, read(name))) is not None:
                raise UserError(f"{name} in the exported model in {folder} is not what the checkpoint holds: {problem}."
                                f" {_DEFECT}")
            missing.discard(name)
    except (ValueError, KeyError) as error:
        raise UserError(f"The weights in {folder} cannot be read back: {str(error).rstrip('.')}. {_DEFECT}") from error
    if missing:
        raise UserError(f"The exported model in {folder} lacks {', '.join(sorted(missing)[:8])}. {_DEFECT}")
    return len(expected)


def _difference(found: Tensor, expected: Tensor) -> str | None:
    if found.shape != expected.shape:
        return f"its shape is {tuple(found.shape)}, not {tuple(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"its type is {found.dtype}, not {expected.dtype}"
    if torch.equal(found, expected):
        return None
    places = (found != expected).nonzero()
    first = tuple(places[0].tolist())
    return (f"{len(places):,} of {found.numel():,} values differ, the first at {list(first)}: {float(found[first])!r} "
            f"instead of {float(expected[first])!r}")


@dataclass(frozen=True)
class Agreement:
    """How far the training model and transformers, in float32, are from a float64 forward pass of the checkpoint.

    Attributes:
        tokens_compared, layers_compared: on what. Layers beyond those have had their tensors compared only.
        largest_logit: of the float64 pass, by magnitude.
        largest_logit_difference: between the training model and transformers.
        training_logit_error, transformers_logit_error: largest difference of a logit from the float64 pass.
        single_precision_logit_error: the same of our network wholly in single precision, rotary angles too, as
            transformers computes them; at least float32's resolution at the largest logit. The yardstick.
        argmax_equal, argmax_decided: tokens where both sides' likeliest next token is the float64 pass's; tokens
            where its lead is beyond rounding, so that it has to be.
        token_loss: mean next-token loss of the float64 pass in nats.
        training_loss_error, transformers_loss_error, single_precision_loss_error: largest difference of one token's
            loss.
        factor: how many times single precision's own error was allowed.
    """

    tokens_compared: int
    layers_compared: int
    largest_logit: float
    largest_logit_difference: float
    training_logit_error: float
    transformers_logit_error: float
    single_precision_logit_error: float
    argmax_equal: int
    argmax_decided: int
    argmax_wrong: int
    token_loss: float
    training_loss_error: float
    transformers_loss_error: float
    single_precision_loss_error: float
    factor: float = FACTOR

    @property
    def problems(self) -> list[str]:
        """What is beyond rounding, as sentences; empty for a sound export. NaN is beyond everything."""
        found = []
        sides = (("transformers'", self.transformers_logit_error, self.transformers_loss_error),
                 ("the training model's", self.training_logit_error, self.training_loss_error))
        for whose, logit, loss in sides:
            if not logit <= self.factor * self.single_precision_logit_error:
                found.append(f"{whose} logits are off by up to {logit:.1e}, where float32 is off by "
                             f"{self.single_precision_logit_error:.1e} (logits up to {self.largest_logit:.1f})")
            if not loss <= self.factor * self.single_precision_loss_error:
                found.append(f"{whose} token losses are off by up to {loss:.1e} nats, where float32 is off by "
                             f"{self.single_precision_loss_error:.1e}")
        resolution = self.largest_logit * torch.finfo(torch.float32).eps
        if not self.training_logit_error <= self.factor * max(self.transformers_logit_error, resolution):
            found.append(f"the training model's logits are off by up to {self.training_logit_error:.1e}, transformers' "
                         f"by only {self.transformers_logit_error:.1e}")
        if self.argmax_wrong:
            found.append(f"the likeliest next token is another on {self.argmax_wrong} of {self.argmax_decided} tokens "
                         f"where rounding cannot decide it")
        return found

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        return (f"off a float64 forward pass by at most: transformers {self.transformers_logit_error:.1e}, training "
                f"model {self.training_logit_error:.1e}, float32 itself {self.single_precision_logit_error:.1e} "
                f"(x {self.factor:g} allowed; logits up to {self.largest_logit:.1f}); argmax equal on "
                f"{self.argmax_equal} of {self.tokens_compared} held-out tokens (rounding decides "
                f"{self.tokens_compared - self.argmax_decided}); token losses off by at most "
                f"{max(self.transformers_loss_error, self.training_loss_error):.1e} nats")

    def counts(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


def compare_logits(folder: Path, config: ModelConfig, read: Read, tokens: Tensor, layers: int) -> Agreement:
    """Judge what transformers and the training model compute in float32 by a float64 pass of the checkpoint's weights.

    Our passes hold the weights of one layer at a time, in float64 at most 8 bytes a parameter of the largest layer or
    embedding; transformers holds `layers` layers of the export, embedding and output in float32. The training model
    never reads the export, transformers nothing else.

    Args:
        folder: the export, in Hugging Face's shape.
        read: gives one weight of the checkpoint, rounded to the export's type: that rounding is the user's wish, not a
            difference to find.
        tokens: (1, length) int64.
        layers: compare the network with the first so many layers only.

    Raises:
        UserError: saying what is beyond rounding, and after which part of the network the two begin to differ.
    """
    small = config.model_copy(update={"layers": layers})
    reference = streamed_logits(small, read, tokens, torch.float64)
    if not bool(reference.isfinite().all()):
        raise UserError(f"The model that was trained has logits that are NaN or infinite on {tokens.numel()} tokens, "
                        f"even in float64, so its export cannot be compared. Convert an earlier checkpoint, or look "
                        f"for NaN in its weights.")
    ours = streamed_logits(small, read, tokens, torch.float32)
    single = streamed_logits(small, read, tokens, torch.float32, SingleAngles(small))
    theirs, report, _ = transformers_logits(folder, tokens, layers)
    if absent := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise UserError(f"transformers does not find {', '.join(absent[:8])} in {folder}. {_DEFECT}")
    found = agreement(reference, ours, theirs, single, tokens, layers)
    if found.problems:
        where = _parting(folder, small, read, tokens)
        raise UserError(f"The exported model in {folder} does not compute what the training model does, compared with "
                        f"a float64 forward pass of the checkpoint on {tokens.numel()} tokens:\n"
                        f"{listed(found.problems)}\n{where} {_DEFECT}")
    return found


def agreement(reference: Tensor, ours: Tensor, theirs: Tensor, single: Tensor, tokens: Tensor,
              layers: int) -> Agreement:
    """The figures of `Agreement`.

    Args:
        reference: float64 logits, (1, length, vocabulary).
        ours, theirs, single: float32 logits of the training model, of transformers, and wholly in single precision.
        tokens: (1, length) int64: each is the target of the one before.
    """
    largest = float(reference.abs().max())
    resolution = largest * torch.finfo(torch.float32).eps
    single_error = max(_error(single, reference), resolution)
    best, second = reference.topk(2, dim=-1).values.unbind(-1)
    decided = best - second > 2 * FACTOR * single_error
    likeliest = reference.argmax(-1)
    equal = (theirs.argmax(-1) == likeliest) & (ours.argmax(-1) == likeliest)
    losses = _token_losses(reference, tokens)

    def loss_error(logits: Tensor) -> float:
        return _error(_token_losses(logits, tokens), losses)
    return Agreement(
        tokens_compared=tokens.numel(), layers_compared=layers, largest_logit=largest,
        largest_logit_difference=_error(ours, theirs), training_logit_error=_error(ours, reference),
        transformers_logit_error=_error(theirs, reference), single_precision_logit_error=single_error,
        argmax_equal=int(equal.sum()), argmax_decided=int(decided.sum()), argmax_wrong=int((decided & ~equal).sum()),
        token_loss=float(losses.mean()) if losses.numel() else 0.0, training_loss_error=loss_error(ours),
        transformers_loss_error=loss_error(theirs), single_precision_loss_error=max(loss_error(single), resolution))


def _error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).abs().max()) if found.numel() else 0.0


def _token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Nats of each token but the first, float64, (1, length - 1)."""
    scores = logits[:, :-1].double().log_softmax(-1)
    return -scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)


class SingleAngles(RotaryTable):
    """Rotary angles in float32, as other programs compute them: at position 1,000 they are off by up to 3e-5."""

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        config = self.config
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling).float()
        angles = positions.float().unsqueeze(-1) * frequencies
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


@torch.no_grad()
def streamed_logits(config: ModelConfig, read: Read, tokens: Tensor, dtype: torch.dtype,
                    table: RotaryTable | None = None, states: dict[str, Tensor] | None = None) -> Tensor:
    """Logits of `Llama` (1, length, vocabulary) whose weights are there only while their part of it computes.

    Args:
        read: gives one weight by name; it is asked for each once a pass.
        dtype: of weights and arithmetic, float32 or float64.
        table: rotary angles other than the model's own.
        states: is given the output of each part in order, by name.
    """
    with torch.device("meta"):
        model = Llama(config).eval()
    if table is not None:
        model.rotary_table = table
    for name, part in _parts(model):
        source = "tok_embeddings" if name == "output" and config.tied_embeddings else name

        def load(module: nn.Module, _: Any, source: str = source) -> None:
            module.load_state_dict({key: read(f"{source}.{key}").to(dtype) for key in module.state_dict()}, assign=True)

        def drop(module: nn.Module, _: Any, output: Tensor, name: str = name) -> None:
            module.to("meta")
            if states is not None:
                states[name] = output
        part.register_forward_pre_hook(load)
        part.register_forward_hook(drop)
    logits: Tensor = model(tokens)
    return logits


def _parts(model: Llama) -> list[tuple[str, nn.Module]]:
    return [("tok_embeddings", model.tok_embeddings),
            *((f"layers.{index}", layer) for index, layer in enumerate(model.layers)),
            ("norm", model.norm), ("output", model.output)]


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Tensor, layers: int,
                        states: bool = False) -> tuple[Tensor, dict[str, Any], tuple[Tensor, ...]]:
    """What transformers computes of the export in float32: logits, its loading report, and the outputs of all parts
    before the last if `states` are asked for."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # of a model of fewer layers, the others' weights are reported as left over
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    each = {key: content[key][:layers] for key in ("layer_types", "no_rope_layers") if key in content}
    found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, num_hidden_layers=layers, **each,
                                                      output_loading_info=True)
    model, report = found
    output = model.eval()(tokens, output_hidden_states=states)
    return output.logits.float(), report, tuple(output.hidden_states or ())


def _parting(folder: Path, config: ModelConfig, read: Read, tokens: Tensor) -> str:
    """After which part of the network transformers begins to differ from the checkpoint's model by more than rounding.

    Its hidden states are the embedding, each layer's output but the last's, and the last normed.
    """
    exact: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    streamed_logits(config, read, tokens, torch.float64, states=exact)
    streamed_logits(config, read, tokens, torch.float32, SingleAngles(config), states=rounded)
    logits, _, hidden = transformers_logits(folder, tokens, config.layers, states=True)
    seen = [name for name in exact if name != f"layers.{config.layers - 1}"]
    for name, theirs in zip(seen, (*hidden, logits), strict=True):
        size = float(exact[name].abs().max())
        off = _error(theirs, exact[name])
        if not off <= FACTOR * max(_error(rounded[name], exact[name]), size * torch.finfo(torch.float32).eps):
            through = f"layers.{config.layers - 1} and norm" if name == "norm" else name
            return f"They agree before {through}; after it values up to {size:.2g} differ by {off:.1e}."
    return "No part of transformers' model differs by more than rounding: look at the training model."
