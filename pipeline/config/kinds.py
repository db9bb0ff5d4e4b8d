"""Settings that name a kind: what ships with Drover stands in a table, and `my_module:MyClass` names one from outside.

Both are one class, which holds its own settings: `{kind: length, least_characters: 200}` becomes a
`Length(least_characters=200)`. What ships is checked when a configuration is read, with file and line. A module from
outside is imported only where its class is used, and where that is about to be: whoever merely looks at a run needs
it not, and executes nothing of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from drover.pipeline.config.section import Section, advice, sentence
from drover.pipeline.core.errors import UserError, all_told, listed

_MAPPING = TypeAdapter(dict[str, Any], config=ConfigDict(strict=True, defer_build=True))
_OUTSIDE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Kind(Section):
    """What one item of a list of kinds is made of. Further settings are fields of the class that the kind names."""

    needs: ClassVar[str] = ""
    """A module without which it cannot work, where Drover does not need that anyway: its absence is refused before
    anything starts."""

    kind: str
    """A name of what ships, or `my_module:MyClass`."""


class Outside(Kind):
    """A kind from outside of Drover, as it was written: its class and its settings are not looked at yet."""

    model_config = ConfigDict(extra="allow")

    @property
    def module(self) -> str:
        """The module that holds the class."""
        return self.kind.partition(":")[0]


Of = TypeVar("Of", bound=Kind)


def impossible(text: str) -> PydanticCustomError:
    """To be raised by a validator, where settings of one item do not go together."""
    return PydanticCustomError("impossible", "{text}", {"text": text})


@dataclass(frozen=True)
class Kinds(Generic[Of]):
    """The kinds of one setting.

    Attributes:
        setting: where they are listed, dotted, as `shard.filters`.
        what: what one of them is called, as `filter`.
        base: the module and class that all of them extend, as "module:Class".
        shipped: what ships: name -> "module:Class", imported when it is first asked for.
    """

    setting: str
    what: str
    base: str
    shipped: Mapping[str, str]

    def shipped_class(self, kind: Any) -> type[Of] | None:
        """The class of a kind that ships; None for any other."""
        shipped = isinstance(kind, str) and kind in self.shipped
        return imported(self.shipped[kind], self.setting) if shipped else None

    def read(self, value: Any) -> Of | Outside:
        """An item of the list as it stands in a configuration: settings with a `kind`, or a kind alone.

        Raises:
            ValidationError: an unknown kind, or wrong settings of one that ships; pydantic puts it in its place.
        """
        if isinstance(value, Kind):
            return cast("Of | Outside", value)  # made in Python, of the right kind
        settings = {"kind": value} if isinstance(value, str) else _MAPPING.validate_python(value)
        written = Outside.model_validate(settings)
        if (found := self.shipped_class(written.kind)) is not None:
            return found.model_validate(settings)
        if _OUTSIDE.fullmatch(written.kind):
            return written
        unknown = PydanticCustomError("unknown_kind", "there is no {what} of this kind; {advice}", {
            "what": self.what, "advice": advice(written.kind, [*self.shipped, "my_module:MyClass (of your own)"])})
        raise ValidationError.from_exception_data(self.what, [
            InitErrorDetails(type=unknown, loc=("kind",), input=written.kind)])

    def made(self, items: Iterable[Of | Outside]) -> list[Of]:
        """The items, those from outside imported and their settings checked.

        Raises:
            UserError: naming every one that cannot be had, and every wrong setting, by its place.
        """
        return all_told(*(partial(self._made, item, f"{self.setting}.{index}") for index, item in enumerate(items)))

    def _made(self, item: Of | Outside, at: str) -> Of:
        if not isinstance(item, Outside):
            return item
        found = imported(item.kind, f"{at}.kind")
        if not (isinstance(found, type) and issubclass(found, imported(self.base, at))):
            raise UserError(f"{at}.kind names {item.kind}, which is no {self.what}: it must be a class that extends "
                            f"{self.base.replace(':', '.')}.")
        section = cast("type[Section]", found)
        try:
            return cast("Of", section.model_validate(item.model_dump()))
        except PydanticUserError as error:  # of a field's type, when the class is first used
            raise UserError(f"{at}.kind names {item.kind}, which pydantic cannot use: {error.message}") from error
        except ValidationError as error:
            raise UserError(listed([
                sentence(problem, ".".join([at, *map(str, problem["loc"])]), advice(str(problem["loc"][-1]),
                                                                                   section.model_fields))
                for problem in error.errors()])) from None


@dataclass(frozen=True)
class OptimizerKind:
    """What there is to know of an optimizer before torch is loaded.

    Attributes:
        make: "module:name" of what makes it, called as `make(weights, config, grid)`; see
            `drover.pipeline.training.optimizers.base.Make`. Imported by the training ranks only.
        matrix_bytes: bytes of its state for each element of the blocks' matrices, where weights are float32.
        other_bytes: the same for each element of embeddings, output matrix and norms.
        settings: what train.optimizer_settings may hold, with defaults, whose types are theirs. A default is part of
            what a run computed: where another is better, give it another name.
        engines: values of parallel.engine that it works under. DeepSpeed lays weights out flat, so that "deepspeed" is
            for those that treat each element by itself (`ElementwiseOptimizer`).
    """

    make: str
    matrix_bytes: float
    other_bytes: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = ("fsdp2",)

    def state_bytes(self, matrix_elements: int, other_elements: int) -> float:
        """Bytes of state of so many elements of the blocks' matrices, and so many others; weights are float32."""
        return self.matrix_bytes * matrix_elements + self.other_bytes * other_elements

    def maker(self) -> Callable[..., Any]:
        """What `make` names, imported; UserError if it is not there."""
        found: Callable[..., Any] = imported(self.make, "train.optimizer")
        return found


def outside_sources(items: Iterable[Kind]) -> dict[str, Path]:
    """The files of the modules that items from outside are taken from, by module, as far as they are found."""
    found = {}
    for item in items:
        if isinstance(item, Outside) and (path := source_of(item.module)) is not None:
            found[item.module] = path
    return found


def source_of(module: str) -> Path | None:
    """The file of a module, found without importing it (only packages that it lies in are); None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def imported(text: str, at: str) -> Any:
    """What "module:name" names; UserError where it cannot be had. at: the setting that names it, dotted."""
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        mend = f"{module} was found, but not what is named in it." if isinstance(error, AttributeError) else \
            f"Name the file of {module} in `plugins`, put its folder on PYTHONPATH, or install it."
        raise UserError(f"{at} names {text}, which cannot be imported ({type(error).__name__}: {error}). {mend}"
                        ) from error
