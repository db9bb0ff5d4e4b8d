"""What every form of weights can do: give any rectangle of any parameter, by our names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import torch
from torch import Tensor

from model.config import ModelConfig
from pipeline.errors import UserError
from pipeline.formats.huggingface import parameter_shapes


class Weights(ABC):
    """The weights of one Llama. Close it, or use it in a `with`.

    Attributes:
        form: name of the form in FORMS.
        path: of the folder.
        config: the network's shape, `vocab_size` known.
    """

    form: ClassVar[str]

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path, self.config = path, config
        problems = config.problems() or (["vocab_size is not stated."] if config.vocab_size is None else [])
        if problems:
            raise UserError(f"The weights in {path} have a shape that cannot be built: {problems[0]}")
        self.shapes = parameter_shapes(config)

    def names(self) -> list[str]:
        """Our names of all parameters, in the network's order; a tied output matrix is the embedding and not named."""
        return list(self.shapes)

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The element type it is stored in."""

    @abstractmethod
    def _read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """As `read`, for a rectangle that is inside."""

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def read(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The rectangle of a parameter that starts at `offset` (default: the beginning) and has `shape` (default: to
        the end), on the host, in the type it is stored in.

        Raises:
            UserError: a file is missing or damaged.
            ValueError: the rectangle is not inside.
        """
        whole = self.shapes[name]
        start = tuple(offset or (0,) * len(whole))
        size = tuple(shape) if shape is not None else tuple(end - at for at, end in zip(start, whole, strict=True))
        if not all(0 <= at <= at + length <= end for at, length, end in zip(start, size, whole, strict=True)):
            raise ValueError(f"A rectangle {size} at {start} does not lie in {name}, {whole}.")
        return self._read(name, start, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
