"""Weights of a Llama by our names, rectangle by rectangle, whatever form they lie in.

    weights = open_weights(Path("runs/demo"))   # of a run, its newest checkpoint
    weights.config                              # the network's shape
    weights.read("layers.0.attention.wq.weight", (0, 0), (64, 288))

Nothing is read before it is asked for, and memory is needed for what is asked for only: a rank that holds a part of a
model reads that part. Another form is another `Weights` (base.py) and a line in FORMS.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from model.llama import Llama
from pipeline.config.shapes import read_shape, shape_from
from pipeline.errors import UserError
from pipeline.files import Inside, read_record
from pipeline.formats.base import Weights
from pipeline.formats.huggingface import pair_rows, rotated_heads, their_names, zero_biases
from pipeline.formats.meta import MetaWeights
from pipeline.formats.meta_params import PARAMS
from pipeline.formats.pickle_file import PickleFile
from pipeline.formats.record import RECORD, recorded_config
from pipeline.formats.sharded_tensors import INDEX, CheckpointReader
from pipeline.formats.tensor_file import DamagedFileError, TensorFile
from pipeline.records.checkpoints import read_marker
from pipeline.records.weight_files import weights_folder

MODEL = "model."
"""Before the names of weights in a training checkpoint; other states of the optimizer have other words."""


class CheckpointWeights(Weights):
    """A training checkpoint, whatever engine wrote it on whatever ranks; or a folder with its tensors' form and weights
    alone, which `weights.json` describes."""

    form = "drover"

    def __init__(self, path: Path) -> None:
        config = recorded_config(path)
        if config is None:
            marker = read_marker(path)
            self._reader = CheckpointReader(path)
            try:
                rows, = self._reader.shape(f"{MODEL}tok_embeddings.weight")[:1]
                config = shape_from({**marker["config"]["model"], "vocab_size": rows})
            except (ValueError, LookupError) as error:
                raise UserError(f"{path} does not say what network it is of ({error}). Take another checkpoint."
                                ) from None
        else:
            self._reader = CheckpointReader(path, mend="Make it again.")
        super().__init__(path, config)
        there = set(self._reader.names(MODEL))
        wrong = [name for name, shape in self.shapes.items()
                 if MODEL + name not in there or self._reader.shape(MODEL + name) != shape]
        if wrong:
            raise UserError(f"The weights in {path} do not fit the shape that is stated beside them: {wrong[0]} is "
                            f"missing or of another shape. Make the folder again.")

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(MODEL + name)

    def _read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return self._reader.read(MODEL + name, offset, shape)

    def close(self) -> None:
        self._reader.close()


class TensorIndex(TypedDict):
    """Which file each tensor lies in, as transformers writes it."""

    weight_map: dict[str, Inside]


class HuggingFaceWeights(Weights):
    """A folder in Hugging Face's form, in one file or many: safetensors, or the pickled .bin of earlier years.

    Raises UserError for what is no Llama, is missing, or has weights that do not fit config.json.
    """

    form = "hf"

    def __init__(self, path: Path) -> None:
        super().__init__(path, read_shape(path / "config.json"))
        self._files: list[TensorFile | PickleFile] = []
        try:
            self._where = self._index()
        except BaseException:
            self.close()
            raise
        self._check()

    def dtype(self, name: str) -> torch.dtype:
        return self._where[self._their[name]].layouts[self._their[name]].dtype

    def _read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        heads = rotated_heads(name, self.config)
        if heads is None or not all(shape):
            return self._rows(name, offset, shape)
        # Their rows of a head are in another order: whole heads are read and put into ours.
        height = self.shapes[name][0] // heads
        first, last = offset[0] // height, -(-(offset[0] + shape[0]) // height)
        rows = self._rows(name, (first * height, *offset[1:]), ((last - first) * height, *shape[1:]))
        skipped = offset[0] - first * height
        return pair_rows(rows, last - first)[skipped:skipped + shape[0]].contiguous()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def stored_shape(self, theirs: str) -> tuple[int, ...] | None:
        """The shape of the tensor that has this name in the files; None where there is none."""
        return self._where[theirs].layouts[theirs].shape if theirs in self._where else None

    def stored(self, theirs: str) -> Tensor:
        """The tensor that has this name in the files, as it lies there. Raises as `read`."""
        layout = self._where[theirs].layouts[theirs]
        return self._filled(theirs, (0,) * len(layout.shape), layout.shape)

    def _rows(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return self._filled(self._their[name], offset, shape)

    def _filled(self, theirs: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        file = self._where[theirs]
        target = torch.empty(shape, dtype=file.layouts[theirs].dtype)
        try:
            file.read_into(target, theirs, offset)
        except (DamagedFileError, OSError) as error:
            raise UserError(f"The weights in {self.path} cannot be read: {error}.") from error
        return target

    def _index(self) -> dict[str, TensorFile | PickleFile]:
        """In which file each of their tensors lies."""
        self._their = their_names(self.config)
        single = next((name for name in SINGLE_FILES if any((self.path / file).is_file() for file in
                                                            (name, f"{name}.index.json"))), SINGLE_FILES[0])
        index = self.path / f"{single}.index.json"
        names = [single]
        if said := read_record(index, TensorIndex, "Fetch or export the folder again."):
            names = sorted(set(said["weight_map"].values()))
        found = {}
        for name in names:
            if Path(name).name != name:
                raise UserError(f"The index {index} names {name!r}, which is no file beside it.")
            try:
                self._files.append((TensorFile if name.endswith(".safetensors") else PickleFile)(self.path / name))
            except (DamagedFileError, OSError) as error:
                raise UserError(f"The weights in {self.path} cannot be read: {error}. Fetch or export them again."
                                ) from None
            found.update(dict.fromkeys(self._files[-1].layouts, self._files[-1]))
        return found

    def _check(self) -> None:
        """UserError unless the files hold what config.json describes: no more, no less, each of its shape."""
        known = set(self._their.values()) | ({"lm_head.weight"} if self.config.tied_embeddings else set())
        zeros = zero_biases(self.config) & self._where.keys()
        wrong = [f"{theirs} is missing" for name in self.shapes if (theirs := self._their[name]) not in self._where]
        wrong += [f"{name} is no parameter of a Llama of {self.config.layers} layers" for name in self._where
                  if name not in known | zeros and not name.endswith("rotary_emb.inv_freq")]
        width = self.config.dim
        wrong += [f"{name} is not {width} zeros: that network computes something else" for name in sorted(zeros)
                  if self.stored_shape(name) != (width,) or self.stored(name).any()]
        wrong += [f"{theirs} is {list(layout)}; by config.json it is {list(shape)}" for name, shape in
                  self.shapes.items() if (theirs := self._their[name]) in self._where
                  and (layout := self._where[theirs].layouts[theirs].shape) != shape]
        if wrong:
            self.close()
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise UserError(f"The weights in {self.path} do not fit its config.json: {'; '.join(wrong[:5])}{more}.")


SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""What a folder in Hugging Face's form has, or has an index of: the first that is there is taken."""

FORMS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], Weights], str]] = {
    "drover": (lambda path: (path / INDEX).is_file(), CheckpointWeights, f"a training checkpoint ({INDEX}), or weights "
               f"alone ({INDEX} and {RECORD})"),
    "hf": (lambda path: (path / "config.json").is_file(), HuggingFaceWeights, "a Hugging Face folder (config.json)"),
    "meta": (lambda path: (path / PARAMS).is_file(), MetaWeights, f"a folder of Meta's ({PARAMS})"),
}
"""By name: whether a folder is of the form, how to open it, and what it is in words."""


def open_weights(path: Path) -> Weights:
    """The weights in a folder of any form, or the newest checkpoint of a run. UserError where there are none."""
    folder = weights_folder(path)
    for recognises, opened, _ in FORMS.values():
        if recognises(folder):
            return opened(folder)
    raise UserError(f"{path} holds no weights that Drover knows. It would be {_forms()}, or a run's folder.")


def load_model(weights: Weights, device: torch.device, dtype: torch.dtype) -> Llama:
    """The network with these weights, on a device; memory for one tensor beside it."""
    with torch.device("meta"):
        model = Llama(weights.config)
    state = {name: weights.read(name).to(device, dtype) for name in weights.names()}
    if weights.config.tied_embeddings:
        state["output.weight"] = state["tok_embeddings.weight"]
    model.load_state_dict(state, assign=True)
    model.tie()
    return model.eval().requires_grad_(False)


def _forms() -> str:
    return ", ".join(words for _, _, words in FORMS.values())
