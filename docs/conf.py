"""The documentation's site (`make docs`), by Sphinx. Pages of reference are made from the code whenever it is built."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.insert(0, str(REPOSITORY))

project = "Drover"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "Drover"
smartquotes = False  # what is in quotes is often typed
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # commands and files, not what they print
html_show_sourcelink = html_copy_source = False
highlight_language = "text"
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
myst_links_external_new_tab = True
suppress_warnings = ["misc.highlighting_failure", "myst.header"]
autodoc_member_order = "bysource"


MADE = HERE / "made"
"""Folder of the pages that are made; git ignores it."""
COPIED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md",
          "results.md": "benchmarks/RESULTS.md", "tasks.md": "configs/tasks/README.md"}
"""Page of the site: file of the repository."""
COMPARISON = "how-it-compares"
"""The anchor of a part of README.md that is a page of the site."""
INTERFACES = {
    "Filter": "drover.pipeline.data.filters.base.Filter",
    "Optimizer": "drover.pipeline.training.optimizers.Optimizer",
    "Attention backend": "drover.model.attention.backend.Backend",
    "Logger": "drover.pipeline.training.sinks.SinkSettings",
    "Hook of training": "drover.pipeline.training.hooks.Hook",
    "Stage": "drover.pipeline.contract.stages.Stage",
}
"""What can be added without a change to Drover, and the class to derive from."""


def setup(app: Sphinx) -> None:
    """Make the generated pages before Sphinx looks for pages."""
    MADE.mkdir(exist_ok=True)
    pages = {"settings.md": settings(), "commands.md": commands(), "interfaces.md": interfaces(),
             "comparison.md": comparison(),
             **{page: (REPOSITORY / path).read_text() for page, path in COPIED.items()}}
    for name, text in pages.items():
        path = MADE / name
        if not path.is_file() or path.read_text() != text:  # an unchanged page is not rendered again
            path.write_text(text)
    app.connect("source-read", _lead_links)


def _lead_links(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to a file of the repository lead to its page; where the site has none, only their text stays. A setting
    that is named in code leads to its explanation."""
    def linked(part: re.Match[str]) -> str:
        known = part[1] in _settings()
        return f"[{part[0]}]({'../' * page.count('/')}made/settings.md#{part[1]})" if known else part[0]

    if page != "made/settings":
        source[0] = re.sub(r"```.*?```|\[[^\]]*\]\([^)]*\)|`(\w+\.[\w.]+)(?:[=:][^`]*)?`", linked, source[0],
                           flags=re.DOTALL)
    if page.startswith("made/"):
        source[0] = re.sub(r"\]\((?:\.\./)*docs/", "](../", source[0])
        for name, path in COPIED.items():
            source[0] = source[0].replace(f"]({path})", f"]({name})")
        return
    source[0] = source[0].replace(f"](../README.md#{COMPARISON}", "](made/comparison.md")
    for name, path in COPIED.items():
        source[0] = source[0].replace(f"](../{path}", f"](made/{name}")
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", source[0])


def comparison() -> str:
    """The parts of README.md that say whether to use Drover: other projects, and what was run on which hardware."""
    text = (REPOSITORY / "README.md").read_text()
    parts = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE))
    return f"# How Drover compares\n{parts['How it compares']}## Hardware and packages\n{parts['Install']}"


@cache
def _settings() -> dict[str, str]:
    """The entry of every setting and kind in `drover explain`, by its dotted name."""
    from drover.pipeline.config.explaining import explain
    from drover.pipeline.config.loading import load_config

    config = load_config(REPOSITORY / "configs/demo.yaml", [], check=False)
    entries = [*explain(config).split("\n\n"), explain(config, "model.preset")]
    return {re.split(r": |\n", entry)[0]: entry for entry in entries}


def settings() -> str:
    """Every setting with its type and default, a chapter for each section and kind; each has its name as an anchor."""
    entries = _settings()
    chapters = [key for key, entry in entries.items() if entry.startswith(f"{key}: ")]

    def chapter(key: str) -> int:
        return max((number for number, name in enumerate(chapters) if f"{key}.".startswith(f"{name}.")), default=-1)

    return "\n".join(["# Settings", "", "`drover explain KEY` prints the same with the value that your configuration "
                      "gives. Below, \"now\" is the value of `configs/demo.yaml`. \"Elsewhere\" are names of (nearly) "
                      "the same setting in other projects. A kind, such as `shard.sources.files`, is an item of "
                      "a list: write `{kind: files, ...}`.", "", "## The run", "",
                      *(line for key in sorted(entries, key=chapter) for line in _entry(key, entries[key]))])


def _entry(key: str, entry: str) -> Iterator[str]:
    """An entry of `explain` as Markdown."""
    from drover.pipeline.config.explaining import ELSEWHERE

    yield f"({key})="
    if entry.startswith(f"{key}: "):
        yield from (f"{'###' if '.' in key else '##'} {key}", "", _escaped(entry.removeprefix(f"{key}: ")), "")
        return
    first, *rest = [_escaped(line.strip()) for line in entry.split("\n")[1:]]
    if key in ELSEWHERE:
        rest.append(f"Elsewhere: {', '.join(f'`{name}`' for name in ELSEWHERE[key].split())}")
    yield from (f"[`{key}`](#{key})", f": {first}", *(f"  \\\n  {line}" for line in rest), "")


def _escaped(text: str) -> str:
    """Plain text as Markdown; what is code stays."""
    if kind := re.match(r"type: (.*?)   default: (.*?)(?:   configured: (.*))?$", text):
        return f"type `{kind[1]}`, default `{kind[2]}`" + (f", configured `{kind[3]}`" if kind[3] else "")
    return re.sub(r"`[^`]*`|[<>*_|\[\]]", lambda part: part[0] if part[0][0] == "`" else f"\\{part[0]}", text)


def commands() -> str:
    """The help of every subcommand."""
    from drover.__main__ import COMMANDS, program

    lines = ["# Commands", ""]
    for name, (_, text) in COMMANDS.items():
        parser = program(name).parser()
        parser.prog = f"drover {name}"
        lines += [f"## drover {name}", "", f"{text[0].upper()}{text[1:]}.", "",
                  "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def interfaces() -> str:
    """The classes from which plug-ins derive."""
    return "\n".join(["# Interfaces for your code", "", "[Extending](../extending.md) has an example of each.", "",
                      *(f"## {title}\n\n```{{eval-rst}}\n.. autoclass:: {name}\n   :members:\n```\n"
                        for title, name in INTERFACES.items())])
