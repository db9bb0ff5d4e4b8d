"""The copy of the code that jobs run."""

import pytest

from drover.launch.slurm.snapshot import planned_snapshot, take_snapshot
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_json
from tests.launch.launcher import commit, git, snapshot_of
from tests.refusal import refused


@pytest.fixture
def checkout(tmp_path):
    """A small repository: a commit, then a change and a new file that is not in it."""
    folder = tmp_path / "checkout"
    for name, text in {"launch/a.py": "A = 1\n", "pipeline/deep/b.py": "B = 1\n", "drover/__init__.py": "D = 1\n",
                       "tests/c.py": "no job needs it\n", ".gitignore": "__pycache__/\nruns/\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    commit(folder)
    return folder


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*")
            if path.is_file() and path.name != "snapshot.json"}


def test_a_checkout_is_copied_once_and_again_with_what_was_changed(checkout, tmp_path):
    planned = planned_snapshot(tmp_path / "run", checkout)
    assert not (tmp_path / "run").exists(), "planning writes nothing"
    copy = snapshot_of(tmp_path / "run", checkout)
    first = {"drover/__init__.py": "D = 1\n", "drover/launch/a.py": "A = 1\n", "drover/pipeline/deep/b.py": "B = 1\n"}
    assert copy == planned and files(copy) == first
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert read_json(copy / "snapshot.json") == {"commit": head, "changed": False}
    (copy / "drover/launch/a.py").unlink()  # a copy that was never finished, or is being removed
    assert snapshot_of(tmp_path / "run", checkout) == copy and files(copy) == first
    (checkout / "launch/a.py").write_text("A = 2\n")
    (checkout / "pipeline/new.py").write_text("N = 1\n")
    other = snapshot_of(tmp_path / "run", checkout)
    assert files(copy) == first, "what is edited later does not reach it"
    assert files(other) == {**first, "drover/launch/a.py": "A = 2\n", "drover/pipeline/new.py": "N = 1\n"}
    assert read_json(other / "snapshot.json")["changed"] is True


@pytest.mark.parametrize("installed", [False, True])
def test_outside_of_git_and_inside_of_another_repository(checkout, tmp_path, installed):
    """Also an installed package, and a copy: there the folder `drover` holds the files themselves."""
    inner = checkout / "runs" / "copy"
    before = files(snapshot_of(tmp_path / "run", checkout))
    for name, text in before.items():
        file = inner / (name if installed or name == "drover/__init__.py" else name.removeprefix("drover/"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    copy = snapshot_of(tmp_path / "other", inner / "drover" if installed else inner)
    assert copy.name.startswith("unversioned-") and files(copy) == before
    assert read_json(copy / "snapshot.json")["commit"] == ""


def test_an_edit_after_the_plan_is_refused(checkout, tmp_path):
    code = planned_snapshot(tmp_path / "run", checkout)
    (checkout / "launch/a.py").write_text("A = 9\n")
    refused(UserError, "changed while they were being copied", take_snapshot, code, checkout)
    assert not (tmp_path / "run").exists()
