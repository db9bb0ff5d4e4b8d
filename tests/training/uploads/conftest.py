"""A saver and its uploads on a group of one."""

import pytest

from tests.training.uploads.saving import Gate, parts_of


@pytest.fixture()
def setting(tmp_path, ranks, monkeypatch):
    """(saver, uploads, copies, said) with a folder as the store, and a gate before it."""
    gate = Gate(monkeypatch)
    made = parts_of(tmp_path / "train", ranks, f"file://{tmp_path}/store")
    yield *made, gate
    gate.failing, gate.before = False, "nothing else"
    gate.open.set()
    made[1].close()


@pytest.fixture()
def events(tmp_path):
    """The train folder's log, which goes on with a checkpoint; a function that has it grow."""
    (tmp_path / "train").mkdir(exist_ok=True)

    def grow(text):
        with (tmp_path / "train" / "events.jsonl").open("a") as file:
            file.write(f'"{text}"\n')
    grow("begun")
    return grow
