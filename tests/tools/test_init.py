"""The configuration that is proposed for a folder of one's own text."""

import json
import shlex

import pytest

from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.tools.init import look, main, propose
from tests.refusal import printed, table
from tests.stages.here import run_here


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Six files of two kinds, and one that holds no text."""
    folder = tmp_path / "my notes"
    folder.mkdir()
    for number in range(6):
        text = "".join(f"On day {number}.{line} we walked {line * 7 % 13} miles to the sea.\n" for line in range(400))
        (folder / f"{number}.{'md' if number % 2 else 'rst'}").write_text(text)
    (folder / "photo.png").write_bytes(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    return folder


def test_few_files_are_a_corpus_with_held_out_text(notes):
    assert main([str(notes), "--minutes", "1"]) == 0
    config = load_config("my-notes.yaml")
    assert config.shard.validation_rule == "tail" and len(config.shard.sources[0].paths) == 2
    assert config.train.prompts == ["On day 0.0 we", "On day 1.0 we", "On day 2.0 we"]
    assert run_here("shard", "my-notes.yaml", "launch.processes=1") == 0
    counts = Run(config).finished("shard").counts
    assert (counts["documents_in"], counts["rejected"]) == (6, 0)


@pytest.mark.parametrize(("flops", "minutes", "params", "limit", "depth"), table("""
    1e11 -> 10 -> null -> epochs of your text -> 2
    1e8 -> 0.1 -> null -> % of your text -> 2
    1e11 -> 10 -> 30000000 -> epochs of your text -> 8""", float, float, json.loads, str, int))
def test_what_the_text_or_the_time_allows(notes, flops, minutes, params, limit, depth):
    found = propose(look(notes), flops, minutes, params)
    assert limit in found.limit and found.shape.layers == depth and not found.shape.problems()


def test_a_file_of_a_word_is_a_corpus_too(tmp_path):
    (tmp_path / "a.md").write_text("a")
    assert propose(look(tmp_path), 1e11, 10, None).steps == 20


@pytest.mark.parametrize(("arguments", "said"), table("""
    'my notes' --minutes 0 -> above 0
    'my notes' --params many -> above 0
    nowhere -> is no folder
    pictures -> its files: 1 .png
    'my notes' --to pictures -> there already""", shlex.split))
def test_what_cannot_be_is_refused(notes, arguments, said, capsys):
    (notes.parent / "pictures").mkdir()
    (notes.parent / "pictures/photo.png").touch()
    assert said in printed(capsys, main, *arguments, expect=2) and not (notes.parent / "my-notes.yaml").exists()
