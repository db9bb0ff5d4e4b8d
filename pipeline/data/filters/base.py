"""What a filter of documents is, and which ones ship.

A filter is a class with settings as fields and one method, which is called with one document at a time:

    class Short(Filter):
        \"\"\"Drops documents that are too long.\"\"\"

        max_characters: int = Field(1000, gt=0)
        \"\"\"Longer documents are dropped.\"\"\"

        def __call__(self, document: Document) -> Document | str:
            return "too long" if len(document.text) > self.max_characters else document

`shard.filters: [{kind: ..., max_characters: 500}]` lists filters in the order in which they run. A document that one
drops never reaches the next. The texts that pass the last filter are deduplicated, hashed, split and trained on.

To add one from outside: put the class into a module that Python finds (PYTHONPATH, or an installed package; where jobs
run, too) and give `kind: my_module:Short`. To add one to Drover: a module in this folder, its line in `FILTERS` of
pipeline/config/shipped.py, and its test in tests/data/filters.

A filter's decision may depend only on the document and the settings: any number of processes read documents, in any
order, and again after a kill. Keep costly objects (a compiled expression) in a `functools.cached_property`: a process
makes each filter once for a unit of reading.

A filter that needs files (a model, evaluation sets) names them in `reads` and reads them in `open`. Declare their paths
as `LocalPath` and with `execution` (`drover.pipeline.config.section`): their content counts, not their place. Keep what
takes long to read in a function with `lru_cache`, once for the process. The stage records these files and their hashes
as its inputs, as filters/<name of the filter>/<name of the file>, and does not continue with other files. Tools that
only look at a run do not import a filter from outside of Drover, so they do not see its files.

The stage counts how many documents a filter dropped and why. A filter counts everything else itself (languages, items
of evaluation sets) and returns it as `findings`, which are added up over all units.
"""

from __future__ import annotations

import unicodedata
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from drover.pipeline.config.kinds import Kind, external_sources
from drover.pipeline.config.section import added
from drover.pipeline.config.shipped import FILTERS
from drover.pipeline.data.documents import Document

if TYPE_CHECKING:
    from drover.pipeline.config.tree import Config


class Filter(Kind):
    """One filter: settings are its fields, each with its text underneath."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """Under which its documents are counted; null: the kind. Two filters of one kind need two names."""
    sources: list[str] | None = added(None, min_length=1)
    """Names of the sources whose documents it sees, as in [web]; null: all."""

    @abstractmethod
    def __call__(self, document: Document) -> Document | str:
        """What becomes of a document.

        Returns:
            The document as it was given, to keep it; one with another text (`Document.with_text`) or `meta`, to
            replace it; or a string, to drop it: the reason, one of a few fixed phrases, because they are counted.
            A document that is left without text is dropped. Its source and id must stay.

        Raises:
            Exception: any; it ends the stage, naming the filter and the document.
        """

    def reads(self) -> list[Path]:
        """The files that it needs; UserError if it cannot find out."""
        return []

    def open(self) -> None:
        """Read what it needs, before the first document of a unit.

        Raises:
            UserError: a file is not there or cannot be used.
        """

    def findings(self) -> dict[str, Any]:
        """What it has counted in the documents so far: numbers, or dictionaries of them."""
        return {}


def libraries(items: Iterable[Kind]) -> dict[str, str]:
    """What else decides what filters do: versions of packages that they need, and of Python's table of characters."""
    from importlib.metadata import packages_distributions, version

    modules = {own.needs for own in FILTERS.made(list(items)) if own.needs}
    packages = {name for module in modules for name in packages_distributions().get(module, [])[:1]}
    return {"unicode": unicodedata.unidata_version} | {package: version(package) for package in sorted(packages)}


def external_code(config: Config) -> dict[str, Path]:
    """The source files of filters from outside, by module."""
    return external_sources(item.kind for item in config.shard.filters)
