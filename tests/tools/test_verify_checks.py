"""What a check of a file says where it fails; and seals, by which a record is known to be what was written."""

from pathlib import Path

import pytest
import yaml

from pipeline.files import read_sealed, seal_of, sealed_text, write_sealed
from tools.verify.checks import Check


@pytest.mark.parametrize("arguments, expected", [
    ((("run", {"path": "a.tar"}, ""), ("run", {"path": "b.arrow"}, ""), None), ["run/a.tar", "run/b.arrow"]),
    ((None, ("run", {"path": "b.arrow"}, ""), {"size": 9}), ["run/b.arrow"]),
    (({"path": "a.tar"}, "shard"), ["a.tar"]), (("run", {"path": "a.tar"}, ""), ["run"])])
def test_what_cannot_be_read_is_named_by_its_path(arguments, expected):
    def path_first(value):
        return (Path(value[0]), *value[1:]) if isinstance(value, tuple) else value

    def fails(*_):
        raise OSError(5, "Input/output error")
    given = tuple(map(path_first, arguments)) if arguments[0] != "run" else path_first(arguments)
    assert [problem.file for problem in Check(fails, given)().problems] == expected


def test_seals(tmp_path):
    """Any byte, also of the seal itself; what was sealed reads back as it was."""
    path, value = tmp_path / "a.json", {"a": [1, {"b": "ä\udce9"}], "seal": "old", "c": {}}
    write_sealed(path, value)
    del value["seal"]
    assert seal_of(path) == "sealed" and read_sealed(path) == value
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 6]) + data[at + 1:])
        assert seal_of(path) == "damaged", at
    text = tmp_path / "a.yaml"
    for content, expected in ((sealed_text("a: 1\n"), "sealed"), ("a: 1\n", "not sealed")):
        text.write_text(content)
        assert seal_of(text) == expected and yaml.safe_load(content) == {"a": 1}
