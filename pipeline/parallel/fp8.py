"""Matrix products in fp8 (`train.precision: fp8`), by torchao: which layers use it, and whether this machine can.

As with bf16, weights, optimizer state and reductions are float32, and gathered weights bfloat16. Only the products
change: both factors are scaled to the range of an 8-bit float and rounded to it. Parameters keep their names, shapes
and values, so a checkpoint does not depend on the precision, and a run can continue in either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from torch import nn

from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import quiet_imports
from drover.pipeline.core.errors import UserError, require
from drover.pipeline.parallel.blocks import compiles

MULTIPLE = 16
"""The hardware needs both dimensions of a weight, and the tokens of a pass, to be multiples of this."""

CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""The oldest compute capability of NVIDIA with kernels for a recipe. Ada (8.9) has only those with one scale per
matrix."""

SMALL = "small"
"""The name in `train.fp8_skip` for all layers of `slower_in_fp8`."""

AMD = ("gfx94", "gfx95", "gfx12")
"""AMD's GPUs with fp8, by the beginnings of their architecture names."""


@dataclass(frozen=True)
class Division:
    """The blocks' linear layers by name (`layers.0.attention.wq`): those that multiply in fp8, and the others with the
    reason. slower: the converted layers that are `slower_in_fp8`."""

    converted: tuple[str, ...]
    left_out: dict[str, str]
    slower: tuple[str, ...]

    def lines(self, recipe: str) -> list[str]:
        """The division in words: how many layers of each kind, and each reason once."""
        result = [f"fp8 ({recipe}) in {_counted(self.converted)}; not in the output head"]
        for reason in dict.fromkeys(self.left_out.values()):
            names = [name for name, why in self.left_out.items() if why == reason]
            result.append(f"bf16 in {_counted(names)}: {reason}")
        return result


def _counted(names: tuple[str, ...] | list[str]) -> str:
    kinds = Counter(name.rpartition(".")[2] for name in names)
    total = "1 linear layer" if len(names) == 1 else f"{len(names)} linear layers"
    return f"{total} ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})" if names else "no linear layer"


def division(config: ModelConfig, train: TrainConfig, tensor: int = 1) -> Division:
    """Which layers of a model are converted.

    tensor: ranks that share each product, by columns or rows. The part on each rank must be a multiple of MULTIPLE.

    Raises:
        UserError: a pattern of `train.fp8_skip` matches no layer, or no layer is left to convert.
    """
    with torch.device("meta"):
        layers = dict(_layers(Llama(config)))
    patterns = [pattern for pattern in train.fp8_skip if pattern != SMALL]
    if unused := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in layers)]:
        raise UserError(f"train.fp8_skip has '{unused[0]}', which matches no linear layer of this model. Their names "
                        f"are like {next(iter(layers))} and {list(layers)[-1]}. `*` matches any part, as in `*.wk` or "
                        f"`layers.0.*`. `{SMALL}` means all layers that are slower in fp8. The output head is never "
                        f"converted.")
    converted, left_out, slower = [], dict[str, str](), []
    for name, layer in layers.items():
        pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        rows, columns = layer.weight.shape
        small = slower_in_fp8(rows, columns, train.fp8_recipe)
        if pattern is not None:
            left_out[name] = f"train.fp8_skip has '{pattern}'"
        elif rows % (MULTIPLE * tensor) or columns % (MULTIPLE * tensor):
            part = f" over {tensor} ranks" if tensor > 1 else ""
            left_out[name] = f"{rows} x {columns}{part} is no multiple of {MULTIPLE}, which fp8 needs"
        elif small and SMALL in train.fp8_skip:
            left_out[name] = f"so small that fp8 is slower (train.fp8_skip has '{SMALL}')"
        else:
            converted.append(name)
            slower += [name] if small else []
    if not converted:
        raise UserError(f"train.precision is fp8, but no layer is left to convert: "
                        f"{'; '.join(dict.fromkeys(left_out.values()))}. Take train.precision=bf16.")
    return Division(tuple(converted), left_out, tuple(slower))


def slower_in_fp8(outputs: int, inputs: int, recipe: str) -> bool:
    """Whether scaling the factors of such a product takes longer than fp8 saves. The thresholds are torchao's, measured
    on H100 (`_auto_filter_for_recipe`; it has none for rowwise_with_gw_hp, which counts as rowwise here). They hold for
    whole weights, even if ranks share them, so that the layout does not decide which layers are converted."""
    if recipe == "tensorwise":
        return inputs <= 4096 and outputs <= 1024
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("layers."):
            yield name, module


def convert_to_fp8(model: Llama, train: TrainConfig, device: torch.device, tensor: int = 1) -> None:
    """Let the linear layers of `division` multiply in fp8, in place. Call it before the model is sharded or compiled.

    device: where the model will compute. A CPU rounds the factors as a GPU does, and multiplies them in float32: there,
    torch's own fp8 product takes a second for a few million multiplications. tensor: see `division`.
    """
    names = frozenset(division(model.config, train, tensor).converted)
    with quiet_imports():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = replace(Float8LinearConfig.from_recipe_name(train.fp8_recipe), emulate=device.type == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in names)
    if train.fp8_recipe != "tensorwise":
        # A graph may compute an activation again. Without this, inductor would round it differently from the value
        # that its scale was found for. It could then exceed the scale: losses became NaN (torchtitan#1108,
        # pytorch#150859).
        inductor: Any = import_module("torch._inductor.config")
        inductor.emulate_precision_casts = True


def refuse_without_fp8(config: Config, device: torch.device) -> None:
    """Refuse fp8 on a machine that cannot compute it.

    Raises:
        UserError: says what this machine lacks.
    """
    train = config.train
    if train.precision != "fp8":
        return
    require("train.precision fp8", "torchao", "take train.precision=bf16")
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:
        kind = torch.cuda.get_device_properties(device).gcnArchName
        if not kind.startswith(AMD):
            raise UserError(f"train.precision is fp8, which this GPU ({name}, {kind}) does not have; AMD's are MI300 "
                            f"(gfx942) and later. Take train.precision=bf16.")
        return
    has, needs = torch.cuda.get_device_capability(device), CAPABILITY[train.fp8_recipe]
    if has < needs:
        other = "train.fp8_recipe=tensorwise would run here, or take" if has >= CAPABILITY["tensorwise"] else "Take"
        raise UserError(f"train.precision is fp8, whose recipe {train.fp8_recipe} needs a GPU of compute capability "
                        f"{needs[0]}.{needs[1]}; this one ({name}) has {has[0]}.{has[1]}. {other} "
                        f"train.precision=bf16.")


def fp8_lines(config: Config, model: ModelConfig, tensor: int, device: torch.device) -> list[str]:
    """Lines for the log of a run in fp8: what is converted, and what makes it slow. Empty for other precisions."""
    train = config.train
    if train.precision != "fp8":
        return []
    layers = division(model, train, tensor)
    result = layers.lines(train.fp8_recipe)
    if device.type == "cpu":
        return [*result, "fp8 on a CPU is for trials: it rounds as a GPU does, and is slower than bf16"]
    if layers.slower:
        result.append(f"of those in fp8, {_counted(layers.slower)} are so small that bf16 is faster on an H100: "
                     f"train.fp8_skip=[{','.join([*train.fp8_skip, SMALL])}] leaves them in bf16")
    if not compiles(train, device):
        result.append("warning: fp8 without train.compile is slower than bf16: the scaling of each product is not "
                      "fused")
    return result
