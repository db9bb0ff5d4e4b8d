"""The table of presets and the budget of a training, against numbers computed by hand."""

import json
import shlex

import pytest

from drover.model.presets import PRESETS
from drover.tools.presets import main
from tests.refusal import printed, table


def test_the_table_has_every_preset_with_its_numbers(capsys):
    tables = printed(capsys, main).split("\n\n")[:-1]
    cells = dict[str, list[str]]()
    for one in tables:
        _, *lines = map(str.split, one.splitlines())
        assert [name for name, *_ in lines] == [*PRESETS]
        for name, *values in lines:
            cells.setdefault(name, []).extend(values)
    assert {"8,030,261,248", "5.791e+10"} <= {*cells["llama3_8b"]}
    assert max(len(line) for one in tables for line in one.splitlines()) <= 80
    assert {"131,072", "16.000", "16.06", "128.48"} <= {*cells["llama3.1_8b"]}  # 16 bytes a parameter in training


@pytest.mark.parametrize(("arguments", "parts"), table("""
    ladder_110m -> 109,529,856
    llama3_8b --budget -> 8,192; 1.606e+11; 9.301e+21; 16.06 GB; 8.03 GB; 4.02 GB
    llama3.1_8b --budget -> 8,192; 9.301e+21
    llama3.1_8b --length 4096 --budget -> 4,096; 8.266e+21
    llama3_8b --budget -> 20 tokens a parameter""", shlex.split))
def test_one_presets_numbers(capsys, arguments, parts):
    """By hand."""
    output = printed(capsys, main, *arguments)
    assert all(part in output for part in parts.split("; ")), output


def test_programs_get_json(capsys):
    [result] = json.loads(printed(capsys, main, "llama3_8b", "--json"))
    assert (result["cache_of_token"], result["cache_of_context"]) == (131072, 1.0)


@pytest.mark.parametrize(("arguments", "output"), table("""
    llama4 -> There is no preset 'llama4'
    llama3_8b llama_110m none -> 'llama_110m'. Did you mean ladder_110m? Known are
    llama_110m -> configs/llama_110m.yaml is a configuration
    llama-8B none -> There is no preset 'none'
    llama-8B none -> Did you mean llama3_8b or llama3.1_8b?
    llama3_8b --length 0 -> --length must be above 0, not 0""", shlex.split))
def test_what_makes_no_sense_is_refused(capsys, arguments, output):
    assert output in printed(capsys, main, *arguments, expect=2)
