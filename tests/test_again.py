"""What tests/again.py runs again: few failures, by their files."""

import pytest

from drover.pipeline.core.files import write_json
from tests import again


@pytest.mark.parametrize("failed, files", [
    (["tests/a.py::test_one", "tests/a.py::test_two[x]", "tests/b.py::test"], "tests/a.py tests/b.py\n"),
    (["tests/a.py"], "tests/a.py\n"), ([], ""), (None, ""), ([f"tests/a.py::test{n}" for n in range(5)], "")])
def test_few_failures_are_named_and_their_files_given(tmp_path, monkeypatch, capsys, failed, files):
    if failed is not None:  # there was a run
        write_json(tmp_path / "lastfailed", dict.fromkeys(failed, True))
    monkeypatch.setattr(again, "FAILED", tmp_path / "lastfailed")
    assert again.main() == (0 if files else 1)
    out, err = capsys.readouterr()
    assert out == files and ("not run again" in err if not files else all(name in err for name in failed))
