"""The tutorials on TinyStories and on exports do what they say: their commands, in order, on stories of our own."""

import random

import pytest
import yaml

from tests.conftest import MINI, REPOSITORY, merged
from tests.data.planning.staged_corpora import texts_of
from tests.pages import checkout, commands, files, typed

pytestmark = pytest.mark.slow
CONFIG = "configs/tinystories.yaml"
STORIES, EXPORT = "tutorial-tinystories", "tutorial-export"


def stories(count):
    """Short texts with enough words for a vocabulary."""
    chance = random.Random(0)
    names = ["".join(chance.choices(("ba", "lo", "mi", "ren", "tu", "ska", "dor", "fi"), k=3)) for _ in range(200)]
    return [f"Once upon a time, {chance.choice(names).title()} found a {chance.choice(names)}.\n" + " ".join(
        f"The {chance.choice(names)} was {chance.choice(names)}, and {chance.choice(names)} said hello."
        for _ in range(12)) + f" Story {number} ends here." for number in range(count)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder like the checkout in which TinyStories are our stories, and the model is a miniature."""
    import pyarrow
    from pyarrow import parquet

    folder = checkout(tmp_path_factory.mktemp("home"))
    (folder / "data/stories").mkdir(parents=True)
    texts = stories(400)
    parquet.write_table(pyarrow.table({"text": texts}), folder / "data/stories/train.parquet")
    (folder / "data/TinyStories-train.txt").write_text("\n<|endoftext|>\n".join(texts))
    config = merged(yaml.safe_load((REPOSITORY / CONFIG).read_text()),
                    {name: section for name, section in MINI.items() if name not in ("name", "shard", "evaluate")})
    name = config["shard"]["sources"][0]["name"]
    config["shard"]["sources"] = [{"kind": "files", "name": name, "paths": ["data/stories/*.parquet"]}]
    config["evaluate"] |= {"prompt_tokens": 8}
    config["shard"] |= {"validation_share": 0.05, "shard_mb": 0.1}
    (folder / CONFIG).write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def outcomes(home):
    """The result of every command of the pages, in their order; the exports' demo is the run of the stories."""
    of_hub = " shard.sources.0.limit=100000"  # which files here have not
    result = {command: typed(command.replace(of_hub, ""), home) for command in commands(STORIES, needs=["the network"])
             if not command.startswith("pip ")}
    (home / "runs/demo").symlink_to("tinystories")
    return result | {command: typed(command, home) for command in commands(EXPORT, needs=[])}


def test_the_page_shows_the_configuration_that_is_shipped():
    assert yaml.safe_load(files(STORIES)[CONFIG]) == yaml.safe_load((REPOSITORY / CONFIG).read_text())


def test_every_command_runs(outcomes):
    assert len(outcomes) >= 10
    for command, result in outcomes.items():
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        assert "Traceback" not in result.stderr


def test_the_text_file_has_the_stories_of_the_parquet_file(home, outcomes):
    stored, cut = ({text.strip() for text in texts_of(home / "runs" / name / "shard").values()}
                   for name in ("tinystories", "from-files"))
    assert stored == cut and len(cut) == 400


def test_transformers_and_drover_write_the_same_text(outcomes):
    theirs, chat = (next(result.stdout.strip() for command, result in outcomes.items() if part in command)
                    for part in ("model.generate", "chat runs/demo"))
    assert theirs == chat != "def main():"
