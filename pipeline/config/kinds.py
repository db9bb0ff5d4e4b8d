"""Settings with a `kind`: a name from a table of built-in classes, or `my_module:MyClass` for a class of your own.

A kind is a class that holds its own settings: `{kind: length, min_characters: 200}` becomes a
`Length(min_characters=200)`. Settings of built-in kinds are checked when a configuration is read, with file and line.
A module of your own is imported only shortly before its class is used. Programs that merely inspect a run therefore
execute none of its code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError

from drover.pipeline.config.section import Section, advice, sentence, shortened
from drover.pipeline.core.errors import UserError, all_results, listed, meant

_EXTERNAL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Kind(Section):
    """An item of a list of kinds. Further settings are fields of the class that the kind names."""

    needs: ClassVar[str] = ""
    """A module that this kind needs and Drover itself does not. If it is missing, Drover stops before anything
    starts."""

    kind: str
    """A built-in name, or `my_module:MyClass`."""


class External(Kind):
    """A kind that is not built in, as it was written: its class and its settings are not checked yet."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Kinds:
    """The kinds of one setting.

    Attributes:
        setting: where they are listed, dotted, such as `shard.filters`.
        what: what one of them is called, such as `filter`.
        base: the module and class that all of them extend, as "module:Class".
        shipped: built-in kinds: name -> "module:Class", imported on first use.
    """

    setting: str
    what: str
    base: str
    shipped: Mapping[str, str]

    def shipped_class(self, kind: Any) -> type[Kind] | None:
        """The class of a built-in kind; None for any other."""
        shipped = isinstance(kind, str) and kind in self.shipped
        return imported(self.shipped[kind], self.setting) if shipped else None

    def read(self, value: Any) -> Kind:
        """One item of the list in a configuration: settings with a `kind`, or a kind alone.

        Raises:
            ValidationError: an unknown kind, or wrong settings of a built-in one; pydantic adds its place.
        """
        if isinstance(value, Kind):
            return value  # created in Python
        settings = {"kind": value} if isinstance(value, str) else value
        kind = settings.get("kind") if isinstance(settings, dict) else None
        shipped = self.shipped_class(kind)
        if shipped is None and isinstance(kind, str) and not _EXTERNAL.fullmatch(kind):
            known = [*self.shipped, "my_module:MyClass (of your own)"]
            raise ValueError(f"there is no {self.what} of the kind '{shortened(kind)}'; {advice(kind, known)}")
        return (shipped or External).model_validate(settings)

    def made(self, items: Iterable[Kind]) -> list[Any]:
        """The items. Those that are not built in are imported, and their settings are checked.

        Raises:
            UserError: names every item that cannot be imported, and every wrong setting, by its place.
        """
        return all_results(*(partial(self._made, item, f"{self.setting}.{index}") for index, item in enumerate(items)))

    def _made(self, item: Kind, at: str) -> Kind:
        if not isinstance(item, External):
            return item
        kind: type[Kind] = imported(item.kind, f"{at}.kind")
        if not (isinstance(kind, type) and issubclass(kind, imported(self.base, at))):
            raise UserError(f"{at}.kind names {item.kind}, which is not a {self.what}: it must be a class that extends "
                            f"{self.base.replace(':', '.')}.")
        if inspect.isabstract(kind):
            raise UserError(f"{at}.kind names {item.kind}, which has no method {', '.join(kind.__abstractmethods__)}: "
                            f"a {self.what} needs it.")
        try:
            made: Kind = kind.model_validate(item.model_dump())
        except ValidationError as error:
            # A validator of all settings together has an empty place.
            places = [[at, *map(str, problem["loc"])] for problem in error.errors()]
            raise UserError(listed([sentence(problem, ".".join(place), advice(place[-1], kind.model_fields))
                                    for place, problem in zip(places, error.errors(), strict=True)])) from None
        return made


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of an optimizer before torch is loaded.

    Attributes:
        make: "module:name" of its factory, called as `make(weights, config, grid)`; see
            `drover.pipeline.training.optimizers.Make`. Only the training ranks import it.
        matrix_bytes: bytes of state per element of the blocks' matrices, for float32 weights.
        other_bytes: the same per element of embeddings, output matrix and norms.
        settings: what train.optimizer_settings may hold, with defaults, whose types are required. A default is part of
            what a run computed: never change one; give a better one another name.
        engines: values of parallel.engine that it works under. DeepSpeed flattens weights, so "deepspeed" is only for
            optimizers that treat each element by itself (`ElementwiseOptimizer`).
    """

    make: str
    matrix_bytes: float
    other_bytes: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = ("fsdp2",)

    def state_bytes(self, matrix_elements: int, other_elements: int) -> float:
        """Bytes of optimizer state for these numbers of elements; weights are float32."""
        return self.matrix_bytes * matrix_elements + self.other_bytes * other_elements

    def maker(self) -> Callable[..., Any]:
        """The imported factory; UserError if it cannot be imported."""
        return imported(self.make, "train.optimizer")


def external_sources(names: Iterable[str]) -> dict[str, Path]:
    """The source files of the modules in names such as `my_module:MyClass`, by module, as far as they are found.
    Built-in names have no module."""
    modules = {module for module, colon, _ in (name.partition(":") for name in names) if colon}
    return {module: path for module in sorted(modules) if (path := source_of(module)) is not None}


def source_of(module: str) -> Path | None:
    """The file of a module, or None. The module is not imported, only the packages that contain it."""
    with suppress(ImportError, ValueError):
        if (spec := importlib.util.find_spec(module)) is not None and spec.has_location:
            return Path(str(spec.origin))
    return None


def imported(text: str, at: str) -> Any:
    """The object that "module:name" names; UserError if it cannot be imported. at: the setting that names it,
    dotted."""
    module, _, name = text.partition(":")
    try:
        holder = importlib.import_module(module)
    except Exception as error:
        raise UserError(f"{at} names {text}, which cannot be imported ({type(error).__name__}: {error}). Name the file "
                        f"of the module in `plugins`, put its folder on PYTHONPATH, or install it.") from error
    try:
        return getattr(holder, name)
    except AttributeError as error:
        raise UserError(f"{at} names {text}, but the module {module} has no {name}; "
                        f"{meant(name, dir(holder), 'correct the name.')}") from error
