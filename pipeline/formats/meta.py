"""Meta's format of a Llama's weights: `params.json`, and `consolidated.NN.pth` for each part of a model that is split
over GPUs.

Names and rotary layout are ours. A part has a slice of each matrix (llama-models' reshard_mp):

    wq, wk, wv, w1, w3, output   rows
    wo, w2                       columns
    tok_embeddings               rows in Llama 3, columns in Llama 1 and 2
    norms                        complete in each part

With more parts than KV heads, neighbouring parts have copies of one head's wk and wv.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.names import EMBEDDING, OUTPUT, module_of, parameter_shapes
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import flush
from drover.pipeline.formats.base import Weights, same_bits
from drover.pipeline.formats.huggingface import OutputFile, Source, text_file
from drover.pipeline.formats.meta_params import LLAMA2_THETA, PARAMS, PARTS, config_of, params_of, read_params
from drover.pipeline.formats.record import recorded_config
from drover.pipeline.formats.tensor_file import DamagedFileError, Dims, PickleFile, Rectangle, overlap

_PART = re.compile(r"consolidated\.(\d\d)\.pth")
_PASSED_OVER = {"rope.freqs"}
"""Ignored tensors: Llama 2's files have them, and the config determines them."""


class Split:
    """How a model is cut into parts.

    Attributes:
        parts: how many there are.
        embedding_axis: the axis along which tok_embeddings is cut: 0 in Llama 3, 1 in Llama 1 and 2.
    """

    def __init__(self, parts: int, kv_heads: int, embedding_axis: int) -> None:
        self.parts, self.embedding_axis = parts, embedding_axis
        self._kv_copies = max(1, parts // kv_heads)

    def cut(self, name: str) -> tuple[int, int]:
        """(axis, copies): the axis along which a parameter is cut, and how many neighbouring parts share a slice."""
        axis = self.embedding_axis if name == EMBEDDING else module_of(name)[1].axis
        if axis is None:
            return 0, self.parts
        return axis, self._kv_copies if name.endswith((".wk.weight", ".wv.weight")) else 1

    def rectangle(self, name: str, shape: Dims, part: int) -> Rectangle:
        """(offset, size) of a part's slice of a parameter. ValueError if it cannot be cut evenly."""
        axis, copies = self.cut(name)
        groups = self.parts // copies
        if shape[axis] % groups or self.parts % copies:
            raise ValueError(f"{name} {list(shape)} cannot be cut into {self.parts} parts")
        size = [*shape]
        size[axis] //= groups
        offset = [0] * len(shape)
        offset[axis] = part // copies * size[axis]
        return tuple(offset), tuple(size)


class MetaWeights(Weights):
    """A folder in Meta's format, in any number of parts.

    Copies in several parts are compared when they are read. Raises UserError if a file is missing or truncated, is not
    of a Llama, or does not fit params.json.
    """

    form = "meta"

    def __init__(self, path: Path) -> None:
        self.path = path
        params = read_params(path)
        self._parts: list[PickleFile] = []
        try:
            self._open()
            super().__init__(path, self._shape(params))
            expected = {name: self._split.rectangle(name, shape, 0)[1] for name, shape in self.stored_shapes.items()}
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            self.close()
            what = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise UserError(f"{path / PARAMS} and the weights in its folder do not make a Llama: {what}.") from None
        except BaseException:
            self.close()
            raise
        self._fit({name: layout.shape for name, layout in self._parts[0].layouts.items()}, expected,
                  _PASSED_OVER, f"its {PARAMS} in {len(self._parts)} parts")

    def dtype(self, name: str) -> torch.dtype:
        return self._parts[0].layouts[name].dtype

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _open(self) -> None:
        """Open all parts, in order. UserError if one is missing, truncated, or not like the first."""
        numbers = sorted(int(found[1]) for path in self.path.iterdir() if (found := _PART.fullmatch(path.name)))
        if not numbers or numbers != list(range(len(numbers))):
            there = ", ".join(f"{number:02d}" for number in numbers) or "none"
            raise UserError(f"{self.path} needs consolidated.00.pth and so on, without gaps; of these numbers "
                            f"there are: {there}. Fetch the rest.")
        try:
            for number in numbers:
                self._parts.append(part := PickleFile(self.path / f"consolidated.{number:02d}.pth"))
                first = self._parts[0]
                if EMBEDDING not in part.layouts:
                    raise DamagedFileError(f"{part.path} has no {EMBEDDING}, which every part of a Llama has")
                if other := sorted({*first.layouts.items()} ^ {*part.layouts.items()}, key=str):
                    raise DamagedFileError(f"{part.path} has another {other[0][0][:100]} than {first.path}: these are "
                                           f"not parts of one model")
        except DamagedFileError as error:
            raise UserError(f"The weights in {self.path} cannot be read: {error}. Fetch or export them again."
                            ) from None

    def _read(self, name: str, offset: Dims, shape: Dims) -> Tensor:
        axis, copies = self._split.cut(name)
        held, at = self._parts[0].layouts[name].shape, [0] * len(shape)
        target = torch.empty(shape, dtype=self.dtype(name))
        for number in range(0, len(self._parts), copies):
            at[axis] = number // copies * held[axis]
            place, inside = overlap(offset, shape, at, held)
            if not (rows := target[place]).numel():
                continue
            first, *others = self._parts[number:number + copies]
            first.read_into(rows, name, inside)
            for other in others:
                again = torch.empty_like(rows)
                other.read_into(again, name, inside)
                if not same_bits(rows, again):
                    raise UserError(f"{first.path} and {other.path} should have the same {name}, and do not: they are "
                                    f"not parts of one model, or damaged. Fetch them again.")
        return target

    def _shape(self, params: dict[str, object]) -> ModelConfig:
        """The network's shape: from Drover's own record if that matches the parameters, else from the parameters and
        the weights."""
        parts, layouts = len(self._parts), self._parts[0].layouts
        rows, width = _whole(layouts[EMBEDDING].shape)
        axis = 1 if parts > 1 and width * parts == params["dim"] else 0
        if not axis and width != params["dim"]:
            raise ValueError(f"dim is {params['dim']}, and the embedding is {width} wide in each of {parts} parts")
        recorded = recorded_config(self.path)
        if recorded is not None and params_of(recorded, parts) == params:
            self._split = Split(parts, recorded.kv_heads, axis)
            return recorded
        vocab_size = rows * (1 if axis else parts)
        if params.get("vocab_size", -1) not in (-1, vocab_size):  # Llama 2 leaves it to the tokenizer, with -1
            raise ValueError(f"vocab_size is {params['vocab_size']}, and the embedding has {vocab_size} rows")
        kv_heads = self._kv_heads(params)
        self._split = Split(parts, kv_heads, axis)
        return config_of(params, vocab_size=vocab_size, kv_heads=kv_heads, tied=self._is_tied(vocab_size))

    def _kv_heads(self, params: dict[str, object]) -> int:
        """The number of different KV heads. If the parameters have as many as there are parts, some may be copies."""
        stated, parts, layers = params.get("n_kv_heads") or params["n_heads"], len(self._parts), params["n_layers"]
        if not isinstance(stated, int) or not isinstance(layers, int) or min(stated, layers) < 1:
            raise TypeError(f"n_kv_heads = {stated!r}, n_layers = {layers!r}")
        if layers > len(self._parts[0].layouts):
            raise ValueError(f"n_layers is {layers}, and the files have {len(self._parts[0].layouts)} tensors")
        if stated < parts and parts % stated:
            raise ValueError(f"{stated} KV heads cannot lie in {parts} parts")
        if stated != parts:
            return stated
        names = [f"layers.{layer}.attention.{kind}.weight" for layer in range(layers) for kind in ("wk", "wv")]
        copies = next((copies for copies in range(parts, 1, -1) if parts % copies == 0
                       and all(self._repeated(name, copies) for name in names)), 1)
        return parts // copies

    def _repeated(self, name: str, copies: int) -> bool:
        """Whether groups of `copies` neighbouring parts begin with the same row. Trained heads never do."""
        rows = []
        for part in self._parts:
            row = torch.empty((1, _whole(part.layouts[name].shape)[1]), dtype=part.layouts[name].dtype)
            part.read_into(row, name, (0, 0))
            rows.append(row)
        return all(same_bits(row, rows[number // copies * copies]) for number, row in enumerate(rows))

    def _is_tied(self, vocab_size: int) -> bool:
        """Whether embedding and output are one matrix: one is missing, or both have the same values."""
        if (output := self._parts[0].layouts.get(OUTPUT)) is None:
            return True
        height, width = _whole(output.shape)
        return height * len(self._parts) == vocab_size and same_bits(*(
            self._read(name, (0, 0), (vocab_size, width)) for name in (EMBEDDING, OUTPUT)))


def _whole(shape: Sequence[int]) -> tuple[int, int]:
    """Height and width of a matrix. ValueError for other shapes."""
    if len(shape) != 2 or not all(shape):
        raise ValueError(f"a matrix is {list(shape)}")
    return shape[0], shape[1]


def meta_files(source: Source, parts: int) -> list[OutputFile]:
    """The parts, and params.json. With Llama 2's rotary base, the embedding is cut along its columns.

    Writing needs memory for one part.

    Raises UserError if the model cannot be cut evenly into so many parts, or if params.json cannot describe it.
    """
    config = source.config
    _refuse_unsaid(config, parts)
    shapes = parameter_shapes(config)
    counts = {"heads": config.heads, "the feed-forward width": config.hidden, "the vocabulary": shapes[EMBEDDING][0],
              "the width": config.dim}

    def uneven(parts: int) -> list[str]:
        shared = config.kv_heads % parts == 0 or parts % config.kv_heads == 0
        return [f"{what} ({count:,})" for what, count in counts.items() if count % parts] + (
            [] if shared else [f"KV heads ({config.kv_heads})"])
    if parts not in PARTS or uneven(parts):
        why = f": {', '.join(uneven(parts))} cannot be divided" if uneven(parts) else ""
        raise UserError(f"This model cannot be cut into {parts} parts{why}. Give --parts "
                        f"{' or '.join(str(count) for count in PARTS if not uneven(count))}.")
    split = Split(parts, config.kv_heads, 1 if config.rope_theta == LLAMA2_THETA else 0)
    return [*(OutputFile(f"consolidated.{part:02d}.pth", len(shapes), _part_writer(source, split, part))
              for part in range(parts)), text_file(PARAMS, json.dumps(params_of(config, parts)) + "\n")]


def meta_reads(config: ModelConfig, parts: int) -> ModelConfig:
    """The shape that a reader of params.json alone assumes."""
    return config_of(params_of(config, parts), vocab_size=config.vocab_size or 0, kv_heads=config.kv_heads,
                     tied=config.tied_embeddings)


def _refuse_unsaid(config: ModelConfig, parts: int) -> None:
    if differing := config.differences(meta_reads(config, parts), {"context_length"}):
        assumed = "; ".join(f"{name} {there}, and here it is {here}" for name, (here, there) in differing.items())
        raise UserError(f"Meta's {PARAMS} cannot state this network, and its readers would compute something else with "
                        f"these weights: they assume {assumed}. Give --format hf.")


def _part_writer(source: Source, split: Split, part: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        shapes = parameter_shapes(source.config)
        state = {name: _alone(source.read(name, *split.rectangle(name, shape, part))) for name, shape in shapes.items()}
        if source.config.tied_embeddings:  # under both names: Meta's model reads both, and torch.save stores it once
            rows = split.rectangle(OUTPUT, shapes[EMBEDDING], part)
            state[OUTPUT] = state[EMBEDDING] if split.embedding_axis == 0 else _alone(source.read(EMBEDDING, *rows))
        with open(path, "wb") as file:
            torch.save(state, file)
            flush(file)
    return write


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in its own memory: of a view, torch.save would write the whole memory."""
    own = tensor.contiguous()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
