"""A saver and its copier on a group of one."""

import pytest

from tests.training.uploads.saving import Gate, parts_of


@pytest.fixture()
def made(tmp_path, ranks):
    """From a store's address to (saver, copier, copies, said), the saver telling the copier, on a group of one."""
    return lambda url, lock=None: parts_of(tmp_path, ranks, url, lock)


@pytest.fixture()
def setting(made, tmp_path, monkeypatch):
    """The same for a folder as the store, and a gate before it."""
    return *made(f"file://{tmp_path}/store"), Gate(monkeypatch)


@pytest.fixture()
def events(tmp_path):
    """The train folder's log, which goes on with a checkpoint; a function that has it grow."""
    (tmp_path / "train").mkdir()

    def grow(text):
        with (tmp_path / "train" / "events.jsonl").open("a") as file:
            file.write(f'"{text}"\n')
    grow("begun")
    return grow
