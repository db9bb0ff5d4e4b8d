"""The tutorial on a crawl does what it says: WARC files become a report in which every page is accounted for."""

import json

import pytest

from tests.conftest import REPOSITORY
from tests.crawl import KINDS
from tests.pages import checkout, commands, files, typed
from tests.waiting import HANG_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * HANG_S)]
PAGE = "tutorial-web"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = checkout(tmp_path_factory.mktemp("web"))
    for name, text in files(PAGE).items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def outcomes(home):
    """The result of every command of the page, in their order."""
    (home / "tests").symlink_to(REPOSITORY / "tests")
    return {command: typed(command, home) for command in commands(PAGE)}


def test_every_command_runs_and_prints_what_the_page_shows(outcomes):
    assert len(outcomes) == 10
    for command, result in outcomes.items():
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    printed = "".join(result.stdout for result in outcomes.values())
    page = (REPOSITORY / f"docs/{PAGE}.md").read_text()
    shown = [line for block in page.split("```")[1::2] if block.startswith("\n") for line in block.splitlines()]
    assert len(shown) > 6 and [line for line in shown if line != "..." and line not in printed] == []


def test_every_page_is_accounted_for(home, outcomes):
    """What the crawl was made of is what became of it: its kinds are known beforehand."""
    counts = json.loads((home / "runs/web/shard/manifest.json").read_text())["counts"]
    not_pages = ("image", "data", "missing", "moved")
    copies = len(range(0, KINDS["news"], 20))
    assert counts["documents_in"] == sum(KINDS.values()) - sum(KINDS[kind] for kind in not_pages) + copies
    assert counts["rejected"] == KINDS["deep"]
    kept = "".join(path.read_text(errors="replace") for path in (home / "runs/web/shard").rglob("*.tar"))
    for kind in ("japanese", "arabic", "table", "broken", "packed", "plain", "cut", "forum", "manual"):
        assert f"https://example.org/{kind}/" in kept, f"pages of the kind {kind} are text"
    assert "no text" not in kept and "\ufffd" not in kept, "neither scripts nor wrong encodings"
    assert f"{counts['documents_in']:,}" in (home / "runs/web/report.html").read_text()
