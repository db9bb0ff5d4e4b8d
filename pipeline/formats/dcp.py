"""The weights of torchtitan's Llama 3 in a checkpoint of torch.distributed.checkpoint (DCP), read and written.

torchtitan names parameters as Meta does, and so do we, and rotates adjacent pairs, too. Its later versions have other
names for some. `.metadata` is a pickle that lists the parts of each tensor, which are files of torch.save within the
files `*.distcp`. The shape is read from a config.json in Hugging Face's form, which has to lie next to them.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from drover.model.config import ModelConfig
from drover.model.huggingface import config_to_json
from drover.model.names import EMBEDDING, OUTPUT, parameter_shapes
from drover.pipeline.config.loading import read_shape
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import opened, read_bytes
from drover.pipeline.formats.huggingface import OutputFile, Source, text_file
from drover.pipeline.formats.interface import Weights
from drover.pipeline.formats.tensor_file import Dims, overlap
from drover.pipeline.records.weight_files import DCP, HUGGING_FACE

_PREFIX = "model."
"""Some savers put it before the names of all weights."""
_LATER = {"attention.wq": "attention.qkv_linear.wq", "attention.wk": "attention.qkv_linear.wk",
          "attention.wv": "attention.qkv_linear.wv", "output": "lm_head"}
"""Names of modules in torchtitan before version 0.3, and what they are called since."""
_OTHERS = ("optimizer.", "optim.", "lr_scheduler.", "train_state.", "dataloader.", "freqs_cis")
"""Beginnings of the names of tensors that are no weights."""
_ALLOWED = {
    "torch": ("Size", *(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))),
    "torch.serialization": ("_get_layout",), "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    metadata.__name__: (*metadata.__all__, "_MEM_FORMAT_ENCODING"),
    filesystem.__name__: ("_StorageInfo", "_StoragePrefix")}
"""Classes that a `.metadata` may name, by module. A pickle may call any function: nothing else is looked up."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of torch has; nothing of it "
                                         f"was executed")
        # A pickle may set attributes of the classes that it names: none of those that others use.
        return _joined if module == "pathlib" else super().find_class(module, name)


def _joined(*parts: str) -> str:
    """Where the saver had written, as text; nobody reads it."""
    return "/".join(parts)


def _read_metadata(path: Path) -> Metadata:
    """The content of a `.metadata`. UserError for anything else, of which nothing is executed."""
    try:
        result = _Unpickler(io.BytesIO(read_bytes(path))).load()
        for name in {part.relative_path for part in result.storage_data.values()}:
            if Path(name).name != name:
                raise ValueError(f"it names {name!r}, which is not a file in its folder")
        for name, tensor in result.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                count = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta").numel()
                if sum(math.prod(part.sizes) for part in tensor.chunks) != count:
                    raise ValueError(f"of {name}, parts are missing")
        return cast("Metadata", result)
    except Exception as error:  # noqa: BLE001 - a pickle may make any class fail
        raise UserError(f"{path} is not the list of a checkpoint of torch.distributed.checkpoint: {error}. Save it "
                        f"again.") from None


class DcpWeights(Weights):
    """The weights of torchtitan's Llama 3 in a DCP folder, as any number of ranks wrote it. Its other states are left
    out.

    Raises UserError if there is no config.json, or if the tensors are not those of the network that it states.
    """

    form = "dcp"
    tied_key = "tie_word_embeddings"

    def __init__(self, path: Path) -> None:
        self._listed = _read_metadata(path / DCP)
        self._names = {_our_name(name): name for name, tensor in self._listed.state_dict_metadata.items()
                       if isinstance(tensor, TensorStorageMetadata)
                       and not name.removeprefix(_PREFIX).startswith(_OTHERS)}
        self._part = lru_cache(maxsize=1)(self._load)  # several rectangles of a part are read one after the other
        sizes = {name: tuple(self._tensor(name).size) for name in self._names}
        if not (path / HUGGING_FACE).is_file():
            layers = len({name.split(".")[1] for name in sizes if name.startswith("layers.")})
            raise UserError(f"{path} does not state how many heads its network of {layers} layers has, nor its rotary "
                            f"embedding. Put the {HUGGING_FACE} of the same model into it, as on the Hub.")
        super().__init__(path, read_shape(path / HUGGING_FACE))
        self._fit(sizes, self.stored_shapes, (), f"its {HUGGING_FACE}")

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).properties.dtype

    def _tensor(self, name: str) -> TensorStorageMetadata:
        return cast("TensorStorageMetadata", self._listed.state_dict_metadata[self._names[name]])

    def _read(self, name: str, offset: Dims, shape: Dims) -> Tensor:
        result = torch.full(shape, torch.nan, dtype=self.dtype(name))  # what no part has is refused
        try:
            for chunk in self._tensor(name).chunks:
                place, inside = overlap(offset, shape, chunk.offsets, chunk.sizes)
                target = result[place]
                if target.numel():
                    target.copy_(self._part(name, chunk.offsets, chunk.sizes)[tuple(
                        slice(start, start + size) for start, size in zip(inside, target.shape, strict=True))])
        except Exception as error:  # a damaged file may make torch fail in any way
            raise UserError(f"{name} in {self.path} cannot be read: {' '.join(str(error).split())[:200]}. Save the "
                            f"checkpoint again.") from error
        return result

    def close(self) -> None:
        self._part.cache_clear()

    def _load(self, name: str, offsets: torch.Size, sizes: torch.Size) -> Tensor:
        """A part of a tensor."""
        place = self._listed.storage_data[MetadataIndex(self._names[name], offsets)]
        if getattr(place, "transform_descriptors", None):
            raise ValueError("it is compressed")
        with opened(self.path / place.relative_path) as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        if zipfile.ZipFile(data).testzip():  # torch does not compare the checksums
            raise ValueError("its checksum does not match its content")
        data.seek(0)
        part = torch.load(data, map_location="cpu", weights_only=True)
        if (part.dtype, part.shape) != (self.dtype(name), sizes):
            raise ValueError(f"a part of it is {part.dtype} of {list(part.shape)}")
        return cast("Tensor", part)


def _our_name(name: str) -> str:
    """Our name of a parameter of torchtitan's, of any version."""
    name = name.removeprefix(_PREFIX)
    return next((name.replace(f"{later}.", f"{ours}.") for ours, later in _LATER.items() if f"{later}." in name), name)


def _their_names(name: str, config: ModelConfig) -> Iterator[str]:
    """Torchtitan's names of a parameter, in its earlier and later versions."""
    for named in (name, OUTPUT) if config.tied_embeddings and name == EMBEDDING else (name,):
        yield named
        module = named.removesuffix(".weight")
        yield from (f"{module.removesuffix(ours)}{later}.weight" for ours, later in _LATER.items()
                    if module.endswith(ours))


def refuse_other_networks(config: ModelConfig) -> None:
    """UserError if torchtitan's Llama 3 cannot be this network."""
    if config.head_width * config.heads != config.dim:
        raise UserError("The heads of torchtitan's Llama 3 together are as wide as the model, and those of this "
                        "network are not: give --format hf.")


def dcp_files(source: Source, token_ids: Mapping[str, Any]) -> list[OutputFile]:
    """The files of a DCP folder that torchtitan's Llama 3 loads: one for each tensor, the config.json, `.metadata`.

    Each tensor has its names of torchtitan's earlier and later versions; a tied output matrix has the embedding's file.
    """
    names = [*parameter_shapes(source.config)]
    content = {**config_to_json(source.config, source.dtype), **token_ids}
    return [*(OutputFile(_file(number), 1, partial(_save, source, name)) for number, name in enumerate(names)),
            text_file(HUGGING_FACE, json.dumps(content, indent=2) + "\n"),
            OutputFile(DCP, 0, partial(_write_metadata, source))]


def _file(number: int) -> str:
    return f"__0_{number}.distcp"


def _save(source: Source, name: str, path: Path) -> None:
    torch.save(source.read(name).contiguous(), path)


def _write_metadata(source: Source, path: Path) -> None:
    """Write `.metadata`, after the other files."""
    tensors = dict[str, Any]()
    places = dict[MetadataIndex, _StorageInfo]()
    for number, (name, shape) in enumerate(parameter_shapes(source.config).items()):
        start = (0,) * len(shape)
        place = path.with_name(_file(number))
        for theirs in _their_names(name, source.config):
            tensors[theirs] = TensorStorageMetadata(
                TensorProperties(source.dtype), torch.Size(shape),
                [ChunkStorageMetadata(torch.Size(start), torch.Size(shape))])
            places[MetadataIndex(theirs, start, 0)] = _StorageInfo(place.name, 0, place.stat().st_size)
    path.write_bytes(pickle.dumps(Metadata(tensors, {name: (name,) for name in tensors}, places, StorageMeta())))
