"""What weights in all formats have in common: the names, shapes and rectangles of a network's parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from drover.model.config import ModelConfig
from drover.model.names import EMBEDDING, OUTPUT, parameter_shapes
from drover.pipeline.core.errors import UserError
from drover.pipeline.formats.tensor_file import Dims, MaybeDims, rectangle_in

_BLOCK_VALUES = 1 << 22
"""How many values of two matrices are compared at a time."""


class Weights(ABC):
    """The weights of one Llama. Close it, or use it in a `with`.

    Attributes:
        form: name of the format.
        path: of the folder.
        config: the network's shape, `vocab_size` known.
        shapes: of all parameters by our names, in the network's order; a tied output matrix is the embedding and not
            named.
        tied_key: the key by which the folder states that the output matrix is the embedding.
    """

    form: ClassVar[str]
    tied_key: ClassVar[str] = "tied_embeddings"

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path, self.config = path, config
        problems = config.problems() or (["vocab_size is not stated."] if config.vocab_size is None else [])
        if problems:
            raise UserError(f"The weights in {path} have a shape that cannot be built: {problems[0]}")
        self.shapes = parameter_shapes(config)

    @property
    def stored_shapes(self) -> Mapping[str, Dims]:
        """`shapes`, and that of a tied output matrix, which may be stored too."""
        return {**self.shapes, OUTPUT: self.shapes[EMBEDDING]} if self.config.tied_embeddings else self.shapes

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The stored element type."""

    @abstractmethod
    def _read(self, name: str, offset: Dims, shape: Dims) -> Tensor:
        """As `read`, for a valid rectangle."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def read(self, name: str, offset: MaybeDims = None, shape: MaybeDims = None, /) -> Tensor:
        """The rectangle of a parameter that starts at `offset` (default: the beginning) and has `shape` (default: to
        the end), on the host, in the stored element type.

        Raises:
            UserError: a file is missing or damaged.
            ValueError: the rectangle is not inside the parameter.
        """
        return self._read(name, *rectangle_in(self.shapes[name], offset, shape))

    def finite(self, name: str, offset: MaybeDims = None, shape: MaybeDims = None, /) -> Tensor:
        """As `read`. Raises UserError also for NaN and infinite values, which arithmetic would spread."""
        result = self.read(name, offset, shape)
        if not bool(result.isfinite().all()):
            count = int((~result.isfinite()).sum())
            raise UserError(f"{self.stored_name(name)} in {self.path} has NaN or infinite values ({count:,}). "
                            f"Fetch or make these weights again, or use others.")
        return result

    def stored_name(self, name: str) -> str:
        """The name of a parameter in the files."""
        return name

    def _fit(self, actual: Mapping[str, Dims], expected: Mapping[str, Dims],
             passed_over: Collection[str], stated: str) -> None:
        """Close, and raise UserError, unless the files have exactly the expected tensors, each with its shape. A tied
        output matrix may be stored too, if it is equal to the embedding.

        Args:
            actual, expected: shapes by the names of this format.
            passed_over: names to ignore.
            stated: the place that states the shape.
        """
        embedding, head = map(self.stored_name, (EMBEDDING, OUTPUT))
        tied = self.config.tied_embeddings
        wrong = [*(f"{name} is missing" for name in expected if name not in actual and not (tied and name == head)),
                 *(f"{name} is no parameter of a Llama of {self.config.layers} layers" for name in actual
                   if name not in expected and name not in passed_over),
                 *(f"{name} is {list(actual[name])}; by {stated} it is {list(shape)}" for name, shape in
                   expected.items() if actual.get(name, shape) != shape)]
        wrong = wrong or [f"{self.stored_name(name)} holds whole numbers ({dtype}): quantised weights are not read"
                          for name in self.shapes if not (dtype := self.dtype(name)).is_floating_point]
        if not wrong and tied and head in actual and not self._head_is_embedding():
            wrong = [f"{self.tied_key} is true, which makes {embedding} the output matrix too, but {head} has other "
                     f"values. If the stored {head} belongs to the model, set {self.tied_key} to false; if not, delete "
                     f"it from the files"]
        if wrong:
            self.close()
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise UserError(f"The weights in {self.path} do not fit {stated}: {'; '.join(wrong[:5])}{more}.")

    def _head_is_embedding(self) -> bool:
        """Whether the stored output matrix of a tied model has the values of the embedding."""
        rows, width = self.shapes[EMBEDDING]
        step = max(1, _BLOCK_VALUES // width)
        return all(torch.equal(*(self._read(name, (row, 0), (min(step, rows - row), width)).double()
                                 for name in (EMBEDDING, OUTPUT))) for row in range(0, rows, step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
