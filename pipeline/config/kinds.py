"""Settings with a `kind`: a name from a table of built-in classes, or `my_module:MyClass` for a class of your own.

A kind is a class that holds its own settings: `{kind: length, min_characters: 200}` becomes a
`Length(min_characters=200)`. Settings of built-in kinds are checked when a configuration is read, with file and line.
A module of your own is imported only shortly before its class is used. Programs that merely inspect a run therefore
execute none of its code.

Plugins are modules outside of the package that register filters, optimizers and more when they are imported.
`plugins: [filters/ours.py, our_package.optimizers]` in a configuration names them. Every process that gets the
configuration on its command line imports them: launcher, stages, ranks, workers. A process that opens the folder of a
run (a tool, `reuse`) imports none that the folder names: a folder is data. There the user names them with `--plugin`.
docs/extending.md says what can be added.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError

from drover.pipeline.config.section import Section, advice, local_path, sentences, shortened
from drover.pipeline.core.console import add_run, printable
from drover.pipeline.core.errors import UserError, all_results, listed

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
            raise UserError(listed(sentences(error, at, kind.model_fields))) from None
        return made


@dataclass(frozen=True)
class OptimizerKind:
    """What is known of an optimizer before torch is loaded.

    Attributes:
        make: "module:name" of its factory, called as `make(weights, config, grid)`; see
            `drover.pipeline.training.optimizers.Make`. Only the training ranks import it.
        settings: what train.optimizer_settings may hold, with defaults, whose types are required. A default is part of
            what a run computed: never change one; give a better one another name.
        engines: values of parallel.engine that it works under. DeepSpeed flattens weights, so "deepspeed" is only for
            optimizers that treat each element by itself (`ElementwiseOptimizer`).
    """

    make: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = ("fsdp2",)

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
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise UserError(f"{at} names {text}, which cannot be imported ({type(error).__name__}: {error}). Correct it, "
                        f"name the file of the module in `plugins`, put its folder on PYTHONPATH, or install it."
                        ) from error


PLUGINS: dict[str, Path] = {}
"""The files of the plugins that this process has imported, by module name."""


def plugin_folders() -> list[str]:
    """Folders from which other processes can import the same plugins."""
    return sorted({str(_root(name, path)) for name, path in PLUGINS.items()})


def plugin_files() -> list[Path]:
    """The files of the imported plugins, and of modules in the same folders that they imported."""
    folders = {path.parent for path in PLUGINS.values()}
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    return sorted({*PLUGINS.values(), *(path for file in files if file and Path(file).is_absolute()  # not torch.classes
                                        and (path := Path(file).resolve()).parent in folders)})


def load_plugins(names: Any, folder: Path, place: str) -> list[str]:
    """Import the plugins of a configuration, in order.

    Args:
        names: names of modules, or of files that end in .py, relative to `folder` or the working directory.
        place: the line that names them, for errors.

    Returns:
        The names in a form that any process can use: files with their whole path.

    Raises:
        UserError: one does not exist, cannot be imported, or has the name of another module.
    """
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{place}: `plugins` is a list of modules and files, not {shortened(repr(names))}.")
    usable = []
    for name in map(local_path, names):
        path = _file(name, folder, place) if name.endswith(".py") else None
        _import(_module(name), path, place)
        usable.append(str(path or name))
    return usable


def add_plugin_option(parser: argparse.ArgumentParser) -> None:
    """--plugin, for programs that open the folder of a run. It may be given several times. Reading the argument imports
    the plugin; UserError if that fails."""
    parser.add_argument("--plugin", type=lambda name: load_plugins([name], Path(), "--plugin")[0], metavar="FILE",
                        help="import this plugin, a file or module (may be given several times); those that a run's "
                             "config.yaml names are not imported")


def add_run_and_plugins(parser: argparse.ArgumentParser) -> None:
    """RUN and --plugin, for programs that work on one run."""
    add_run(parser)
    add_plugin_option(parser)


def imported_plugins(names: list[str]) -> list[str]:
    """Those of a run's plugins that this process has imported, in a form that any process can use."""
    return [str(PLUGINS[_module(name)]) if name.endswith(".py") else name for name in names if _module(name) in PLUGINS]


def left_out(names: Any, run: Path) -> str:
    """A note on a run's plugins that this process has not imported; "" if there are none."""
    absent = [str(name) for name in names if _module(str(name)) not in PLUGINS] if isinstance(names, list) else []
    return printable(
        f"The run {run} names plugins that were not imported: {', '.join(absent)}. Opening a run's folder imports no "
        f"code. If you trust them, name them: give a tool --plugin {' --plugin '.join(absent)}, give launch/submit.py "
        f"or a stage plugins=[{','.join(absent)}].") if absent else ""


def _module(name: str) -> str:
    """The module name of a plugin."""
    return Path(name).stem if name.endswith(".py") else name


def _file(name: str, folder: Path, place: str) -> Path:
    for path in (folder / name, Path(name)):
        if path.is_file():
            return path.resolve()
    looked = " and ".join(dict.fromkeys([str(folder.absolute()), str(Path.cwd())]))
    raise UserError(f"{place}: there is no plugin {name} (looked in {looked}). Put it back or next to the "
                    f"configuration, or correct its path.")


def _import(name: str, path: Path | None, place: str) -> None:
    if path is not None and (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)
        # Workers and other processes that this one starts find it in the same way.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{place}: the plugin {shortened(str(path or name))} cannot be imported: "
                        f"{type(error).__name__}: {shortened(str(error), 2000)}") from error
    origin = Path(str(module.__file__)).resolve()
    if path is not None and origin != path:
        raise UserError(f"{place}: the plugin {path} has the name of another module, {origin}. Rename it.")
    PLUGINS[name] = origin


def _root(name: str, path: Path) -> Path:
    """The folder from which `import name` finds the file."""
    package = path.name == "__init__.py"
    return path.parents[name.count(".") + package]
