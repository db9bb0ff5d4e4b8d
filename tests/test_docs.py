"""The documentation builds without a warning; it and the source use the words that CONTRIBUTING.md asks for."""

import io
import re
import runpy
import token as kinds
from tokenize import COMMENT, STRING, generate_tokens

import pytest

from drover.__main__ import COMMANDS
from drover.pipeline.config.data import FilesSource, HubSource, StdlibSource
from drover.pipeline.config.section import keys_of
from drover.pipeline.config.shipped import FILTERS, OPTIMIZERS, SINKS
from drover.pipeline.config.tree import Config
from drover.pipeline.records.metrics import Line
from tests.conftest import REPOSITORY, run_python
from tests.pages import typed

README = REPOSITORY / "README.md"
AGENTS = REPOSITORY / "AGENTS.md"
PAGES = [README, AGENTS, *sorted((REPOSITORY / "docs").glob("*.md"))]
INCLUDED = [REPOSITORY / path for path in re.findall(r': "([\w/]+\.md)"', (REPOSITORY / "docs/conf.py").read_text())]
"""Files of other folders that are pages of the site."""
FSTRING = getattr(kinds, "FSTRING_MIDDLE", STRING)
"""Python 3.12 splits f-strings into tokens."""
WRITTEN = [page for page in [*PAGES, *INCLUDED] if page.stem != "matrix"]  # made
FORBIDDEN = re.compile(
    r"\b((is|are|was|were|be) (said|told|asked)|which (is said|says)|afresh|anew|laid over|likeliest|owed|let go|"
    r"near[- ]copies|time lost by waiting|last words?|set aside|goes on|go on|went on|told|tells?|mend(s|ed)?|torn|"
    r"beside|stands? (for|in|there)|stood|(one|this) box|verdict)\b", re.IGNORECASE)
"""Words of our own for what the field has a term for, and turns that have to be read twice."""


def prose(text):
    """Paragraphs and items of a page: no code, tables, headings or addresses of links."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|!\[[^\]]*\]", "]", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#", "    ")))


def sentences(text):
    """Of prose; each item of a list is one at least."""
    result = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose(text)):
        result += re.split(r"(?<=[.:;!?])\s+(?=[A-Z`*\[])", " ".join(paragraph.split()))
    return [sentence for sentence in result if re.search(r"\w", sentence)]


def words(text):
    """Code in backticks is one."""
    return len(re.findall(r"\w[\w'’-]*", re.sub(r"`[^`]*`", "code", text)))


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    """A link or anchor that leads nowhere is one."""
    result = run_python("-m", "sphinx", "-q", "-W", "--keep-going", "docs", tmp_path / "site", check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for page, part in {"made/settings": "train.lr", "made/commands": "drover rehearse", "made/interfaces": "on_step",
                       "made/changelog": "0.1.0", "made/comparison": "torchtitan",
                       "getting-started": "bits per byte", "memory": 'href="made/settings.html#train-flash"',
                       "_static/copybutton": "highlight"}.items():
        assert part in next((tmp_path / "site").glob(f"{page}.*")).read_text()


def test_each_setting_and_each_kind_has_an_anchor_of_its_own():
    page = runpy.run_path(str(REPOSITORY / "docs/conf.py"))["settings"]()
    anchors = re.findall(r"^\((.*)\)=$", page, re.MULTILINE)
    kinds = {f"{of.setting}.{kind}": of.shipped_class(kind) for of in (FILTERS, SINKS) for kind in of.shipped} | {
        "shard.sources.stdlib": StdlibSource, "shard.sources.files": FilesSource, "shard.sources.hf": HubSource}
    settings = {*keys_of(Config), *kinds, "model.preset", *(f"train.optimizer.{name}" for name in OPTIMIZERS),
                *(f"{name}.{field}" for name, kind in kinds.items() for field in kind.model_fields)}
    assert len(settings) > 400 and settings <= set(anchors), settings - set(anchors)
    assert len(anchors) == len(set(anchors)) and "shard.sources.files.text_field" in anchors


def test_what_coding_agents_are_given_is_there():
    text = AGENTS.read_text()
    assert len(text.splitlines()) <= 60
    paths = re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+)?)`|pytest -q ([\w/.]+)|(tests/\w+\.py)", text)
    for path in {next(filter(None, groups)) for groups in paths} - {"runs/NAME/"}:
        assert (REPOSITORY / path).exists(), path
    targets = re.findall(r"make ([\w-]+) ", text)
    subcommands = re.findall(r"drover (\w+) \w", text)
    assert typed(f"make -n {' '.join(targets)}", REPOSITORY).returncode == 0 and len(targets) > 3
    assert len(subcommands) > 3 and {*subcommands} <= {*COMMANDS}


def test_the_readme_is_short():
    assert words(prose(README.read_text())) <= 900


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_sentences_are_short_and_in_the_words_of_the_field(page):
    text = page.read_text()
    lengths = [words(sentence) for sentence in sentences(text)]
    assert sum(lengths) <= 17 * len(lengths), sorted(sentences(text), key=words)[-5:]
    assert not (result := FORBIDDEN.search(prose(text))), result


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_was_not_run_is_on_one_page(page):
    """docs/not-tried.md has it, with a date."""
    gaps = re.search(r"\bnot (been )?(run|tried|measured)\b|\buntried\b", page.read_text())
    assert bool(gaps) == (page.stem == "not-tried"), gaps


@pytest.mark.parametrize("room", ["pipeline", "model", "launch", "tools", "benchmarks", "drover"])
def test_strings_and_comments_use_the_words_of_the_field(room):
    """Names of variables in f-strings, and keys of one word, are no prose."""
    result = []
    for path in sorted((REPOSITORY / room).rglob("*.py")):
        for token in generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type in (STRING, COMMENT, FSTRING) and " " in token.string:
                text = " ".join(re.sub(r"\{[^{}]*\}|`[^`]*`|^ *\w+:", "", token.string, flags=re.MULTILINE).split())
                result += [f"{path}:{token.start[0]}: {word[0]}" for word in FORBIDDEN.finditer(text)]
    assert not result


@pytest.mark.parametrize("page", [*PAGES, *INCLUDED], ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_work_where_the_site_is_not_built(page):
    """As on a code host: they lead to files that are in the repository."""
    kept = set(typed("git ls-files", REPOSITORY).stdout.splitlines())
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)):
        if not re.match(r"\w+:", link):
            path = link.partition("#")[0]
            target = (page.parent / path).resolve() if path else page
            name = target.relative_to(REPOSITORY).as_posix()
            assert name in kept or any(file.startswith(f"{name}/") for file in kept), link


def test_the_reference_has_the_fields_of_metrics():
    page = (REPOSITORY / "docs/reference.md").read_text()
    absent = [field for field in Line.__annotations__ if f"`{field}`" not in page]
    assert absent == ["stall_s"], "that is a field of events"
