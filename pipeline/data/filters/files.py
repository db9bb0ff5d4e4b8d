"""The files that filters read, as inputs of the stage shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drover.pipeline.config.shipped import name_of
from drover.pipeline.core.errors import AbsentInputError, UserError, listed
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.sources import named_files
from drover.pipeline.storage.object_files import InputFile

if TYPE_CHECKING:
    from drover.pipeline.config.tree import Config

FOLDER = "filters"
"""What the names of filters' files begin with."""


def input_files(config: Config) -> list[tuple[str, InputFile]]:
    """The files that filters read, as (`filters/<name of the filter>/<name of the file>`, path).

    A name goes back to the folder that holds all files of the filter.

    Raises:
        AbsentInputError: naming all that are not there.
    """
    result: list[tuple[str, InputFile]] = []
    problems = []
    for own in config.shard.filters:
        try:
            paths = [path.absolute() for path in own.reads()] if isinstance(own, Filter) else []
        except UserError as error:
            problems.append(str(error))
            continue
        problems += [f"the filter {name_of(own)} needs {path}, which is not there. Put it there, or correct its path."
                     for path in paths if not path.is_file()]
        result += named_files(f"{FOLDER}/{name_of(own)}", [path for path in dict.fromkeys(paths) if path.is_file()])
    if result and FOLDER in config.shard.source_names:
        raise UserError(f"A source of shard.sources is called {FOLDER}, which the files of filters are called too. "
                        f"Give it another `name`.")
    if problems:
        raise AbsentInputError(listed(problems), result, {FOLDER})
    return result
