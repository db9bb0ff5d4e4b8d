"""The table of presets and the answer about the KV cache, against numbers computed by hand."""

import subprocess
import sys

import pytest

from model.presets import PRESETS
from tests.conftest import REPOSITORY
from tools.presets import main


def printed(capsys, *arguments, expect=0):
    assert main(list(arguments)) == expect
    said = capsys.readouterr()
    return said.err if expect else said.out


def test_the_table_has_every_preset_with_its_numbers(capsys):
    lines = printed(capsys).splitlines()
    cells = {line.split()[0]: line.split() for line in lines[1:1 + len(PRESETS)]}
    assert cells.keys() == PRESETS.keys()
    assert "8,030,261,248" in cells["llama3_8b"] and "5.791e+10" in cells["llama3_8b"]
    assert cells["llama3.1_8b"][9:13] == ["131,072", "B", "16.000", "GiB"]
    assert "2.47" in cells["llama3.2_1b"] and "19.77" in cells["llama3.2_1b"]  # 16 bytes a parameter


def test_the_vocabulary_of_the_ladder_is_asked_for(capsys):
    assert "950,912" in printed(capsys, "ladder_1m", "--vocab-size", "4096")
    assert "109,529,856" in printed(capsys, "ladder_110m")


@pytest.mark.parametrize(("arguments", "size", "shown"), [
    (["llama3_70b", "--length", "4096"], 1_342_177_280, "1.250 GiB"),
    (["llama2_70b", "--length", "4096", "--dtype", "fp32", "--batch", "2"], 5_368_709_120, "5.000 GiB"),
    (["llama3.2-1B"], 4_294_967_296, "4.000 GiB"),
    (["tinyllama_1.1b", "--length", "1", "--dtype", "fp8"], 11_264, "11.000 KiB")])
def test_memory_of_the_kv_cache(capsys, arguments, size, shown):
    said = printed(capsys, *arguments, "--kv-cache")
    assert f"{size:,} bytes ({shown})" in said


@pytest.mark.parametrize(("arguments", "parts"), [  # 6 x 8,030,261,248 x 20 x 8,030,261,248, and so on, by hand
    (["llama3_8b", "--peak-tflops", "989", "--mfu", "0.4"],
     ["1.606e+11 tokens (20 a parameter)", "7.738e+21 FLOPs", "5,433.5 GPU-hours at 40% of 989 TFLOP/s",
      "weights 16.06 GB in 16 bits, 8.03 GB in 8 bits, 4.02 GB in 4 bits"]),
    (["llama2_13b"], ["weights 26.03 GB in 16 bits"]),
    (["llama2_70b", "--tokens-per-parameter", "1"], ["6.898e+10 tokens", "2.855e+22 FLOPs"])])
def test_the_budget_of_a_training(capsys, arguments, parts):
    said = printed(capsys, *arguments, "--budget")
    assert all(part in said for part in parts), said


def test_a_length_beyond_the_context_is_said(capsys):
    assert "the context is 4,096" in printed(capsys, "llama2_7b", "--kv-cache", "--length", "5000")


@pytest.mark.parametrize(("arguments", "said"), [
    (["llama4"], "There is no preset 'llama4'"), (["llama3_8b", "--batch", "0"], "--batch must be above 0, not 0"),
    (["llama3_8b", "--budget", "--mfu", "nan"], "--mfu must be above 0, not nan")])
def test_what_makes_no_sense_is_refused(capsys, arguments, said):
    assert said in printed(capsys, *arguments, expect=2)


def test_it_needs_no_torch():
    code = "import sys; from tools.presets import main; main(['llama3_8b']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True)
