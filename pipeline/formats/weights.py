"""Read the weights of a Llama in any format, by our names and in rectangles.

    weights = open_weights(Path("runs/demo"))   # of a run, its newest checkpoint
    weights.config                              # the network's shape
    weights.read("layers.0.attention.wq.weight", (0, 0), (64, 288))

Only requested rectangles are read and need memory: a rank that owns a part of a model reads that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.llama import Llama
from drover.model.names import (
    EMBEDDING,
    OUTPUT,
    pair_rows,
    rotated_heads,
    their_name,
)
from drover.pipeline.config.loading import read_shape, shape_from
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Inside, read_record
from drover.pipeline.formats.huggingface import Read
from drover.pipeline.formats.interface import Weights
from drover.pipeline.formats.sharded_tensors import INDEX, CheckpointReader
from drover.pipeline.formats.tensor_file import (
    DamagedFileError,
    Dims,
    MaybeDims,
    TensorFile,
)
from drover.pipeline.records.checkpoints import read_marker
from drover.pipeline.records.weight_files import DCP, HUGGING_FACE, weights_folder


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors are equal to the bit: NaN equals the same NaN, and -0 differs from 0."""
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def reader(weights: Weights, dtype: torch.dtype, done: Callable[[], None] = lambda: None) -> Read:
    """Read rectangles in another element type. `done` is called after each.

    Reading raises UserError for NaN and infinite values, and for values that float16 cannot hold: they would silently
    become infinite.
    """
    def read(name: str, offset: MaybeDims = None, shape: MaybeDims = None, /) -> Tensor:
        result = weights.finite(name, offset, shape)
        converted = result.to(dtype)
        if dtype == torch.float16 and bool(converted.isinf().any()):
            raise UserError(f"{weights.stored_name(name)} in {weights.path} has values beyond the largest of fp16, "
                            f"{torch.finfo(dtype).max:,.0f}. Give --dtype bf16 or fp32.")
        done()
        return converted
    return read


MODEL = "model."
"""Prefix of the names of weights in a training checkpoint; optimizer states have other prefixes."""


class CheckpointWeights(Weights):
    """A training checkpoint of any engine and layout."""

    form = "drover"

    def __init__(self, path: Path, config: ModelConfig | None = None) -> None:
        marker = read_marker(path)
        self._reader = CheckpointReader(path)
        try:
            if config is None:
                rows = self._reader.shape(MODEL + EMBEDDING)[0]
                config = shape_from({**marker.config["model"], "vocab_size": rows})
        except (ValueError, LookupError) as error:
            raise UserError(f"{path} does not state its network's shape ({error}). Use another checkpoint.") from None
        super().__init__(path, config)
        self._fit({name.removeprefix(MODEL): self._reader.shape(name) for name in self._reader.names(MODEL)},
                  self.stored_shapes, (), "the shape stated with them")

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(MODEL + name)

    def _read(self, name: str, offset: Dims, shape: Dims) -> Tensor:
        return self._reader.read(MODEL + name, offset, shape)

    def close(self) -> None:
        self._reader.close()


class MeanWeights(Weights):
    """The mean of the weights of one or more checkpoints of a run, as Llama 3 averaged those of its annealing (Polyak
    1991).

    Sums are float64, in the order of the folders, so that the mean depends only on the weights.
    """

    form = "drover"

    def __init__(self, folders: Sequence[Path], config: ModelConfig) -> None:
        with ExitStack() as opening:
            self._parts = [opening.enter_context(CheckpointWeights(folder, config)) for folder in folders]
            super().__init__(folders[0], config)
            self._opened = opening.pop_all()

    def dtype(self, name: str) -> torch.dtype:
        return self._parts[0].dtype(name)

    def _read(self, name: str, offset: Dims, shape: Dims) -> Tensor:
        first, *others = self._parts
        if not others:
            return first.read(name, offset, shape)
        total = first.read(name, offset, shape).to(torch.float64)
        for part in others:
            total += part.read(name, offset, shape)
        return total.div_(len(self._parts)).to(self.dtype(name))

    def close(self) -> None:
        self._opened.close()


class TensorIndex(TypedDict):
    """The file of each tensor, as transformers writes it."""

    weight_map: dict[str, Inside]


class HuggingFaceWeights(Weights):
    """A folder in Hugging Face's format, in one file or many.

    Raises UserError if it is not a Llama, if a file is missing, or if the weights do not fit config.json.
    """

    form = "hf"
    tied_key = "tie_word_embeddings"

    def __init__(self, path: Path) -> None:
        super().__init__(path, read_shape(path / "config.json"))
        self._where: dict[str, TensorFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self._fit({name: file.layouts[name].shape for name, file in self._where.items()},
                  {their_name(name): shape for name, shape in self.stored_shapes.items()},
                  {name for name in self._where if name.endswith("rotary_emb.inv_freq")}, "its config.json")

    def stored_name(self, name: str) -> str:
        return their_name(name)

    def dtype(self, name: str) -> torch.dtype:
        theirs = their_name(name)
        return self._where[theirs].layouts[theirs].dtype

    def _read(self, name: str, offset: Dims, shape: Dims) -> Tensor:
        theirs = their_name(name)
        heads = rotated_heads(name, self.config)
        if heads is None or not all(shape):
            return self._filled(theirs, offset, shape)
        # Their rows of a head are in another order: read whole heads and reorder them.
        height = self.shapes[name][0] // heads
        first, last = offset[0] // height, -(-(offset[0] + shape[0]) // height)
        rows = self._filled(theirs, (first * height, *offset[1:]), ((last - first) * height, *shape[1:]))
        skipped = offset[0] - first * height
        return pair_rows(rows, last - first)[skipped:skipped + shape[0]].contiguous()

    def close(self) -> None:
        for file in set(self._where.values()):
            file.close()

    def stored_shape(self, theirs: str) -> Dims | None:
        """The shape of the tensor with this name in the files; None if there is none."""
        return self._where[theirs].layouts[theirs].shape if theirs in self._where else None

    def stored(self, theirs: str) -> Tensor:
        """The tensor with this name in the files, as it is stored. Raises as `read`."""
        shape = self._where[theirs].layouts[theirs].shape
        return self._filled(theirs, (0,) * len(shape), shape)

    def _filled(self, theirs: str, offset: Dims, shape: Dims) -> Tensor:
        file = self._where[theirs]
        target = torch.empty(shape, dtype=file.layouts[theirs].dtype)
        try:
            file.read_into(target, theirs, offset)
        except (DamagedFileError, OSError) as error:
            raise UserError(f"The weights in {self.path} cannot be read: {error}.") from error
        return target

    def _open(self) -> None:
        """Find the file of each tensor. As in transformers, a single file comes before an index."""
        if (adapter := self.path / "adapter_config.json").is_file():
            raise UserError(f"{adapter} says that an adapter belongs to the weights in {self.path}: merge it "
                            f"(merge_and_unload of peft, then save_pretrained), or remove its files to use the weights "
                            f"without it.")
        index = self.path / f"{SINGLE_FILE}.index.json"
        listed = None if (self.path / SINGLE_FILE).is_file() else read_record(
            index, TensorIndex, "Fetch or export the folder again.")
        for name in sorted(set(listed["weight_map"].values())) if listed else [SINGLE_FILE]:
            if Path(name).name != name:
                raise UserError(f"The index {index} names {name!r}, which is not a file in its folder.")
            try:
                file = TensorFile(self.path / name)
            except (DamagedFileError, OSError) as error:
                raise UserError(f"The weights in {self.path} cannot be read: {error}. Fetch or export them again, "
                                f"as safetensors."
                                ) from None
            for twice in self._where.keys() & file.layouts:
                raise UserError(f"{twice} is both in {self._where[twice].path} and in {file.path}: only one can be the "
                                f"model's. Fetch or export the folder again.")
            self._where.update(dict.fromkeys(file.layouts, file))


SINGLE_FILE = "model.safetensors"
"""Weights of a folder in Hugging Face's format, in one file of this name or with an index."""


def open_weights(path: Path) -> Weights:
    """Open the weights in a folder of any format, or the newest checkpoint of a run. UserError if there are none."""
    folder = weights_folder(path)
    if (folder / INDEX).is_file():
        return CheckpointWeights(folder)
    if (folder / DCP).is_file():
        from drover.pipeline.formats.dcp import DcpWeights
        return DcpWeights(folder)
    if (folder / HUGGING_FACE).is_file():
        return HuggingFaceWeights(folder)
    raise UserError(f"{path} has no weights in a format that Drover knows: a training checkpoint ({INDEX}), a "
                    f"Hugging Face folder ({HUGGING_FACE}), one of torch.distributed.checkpoint ({DCP}), or a run's "
                    f"folder.")


def load_model(weights: Weights, device: torch.device, dtype: torch.dtype) -> Llama:
    """The network with these weights, on a device. Loading needs memory for one further tensor."""
    with torch.device("meta"):
        model = Llama(weights.config)
    state = {name: weights.read(name).to(device, dtype) for name in weights.shapes}
    if weights.config.tied_embeddings:
        state[OUTPUT] = state[EMBEDDING]
    model.load_state_dict(state, assign=True)
    model.tie()
    return model.eval().requires_grad_(False)
