"""Figures for ranks that are not there are made. How large they are, no test says."""

import re

import pytest

from tools.at_scale.__main__ import main


@pytest.mark.parametrize("layout", [["--layout", "zero3"], ["--tensor", "4", "--replicate", "2"]])
def test_the_index_of_many_ranks_is_put_together_and_read(layout, capsys):
    assert main(["index", "--model", "ladder_15m", "--ranks", "72", *layout]) == 0
    said = capsys.readouterr().out
    pieces, runs = (int(count.replace(",", "")) for count in re.search(r"in ([\d,]+) pieces are ([\d,]+) runs",
                                                                       said).groups())
    assert runs < pieces / 4 and "rank 36, which goes on" in said


def test_a_draw_and_sockets_are_measured(capsys):
    assert main(["draw", "--model", "ladder_15m", "--ranks", "4", "--tensor", "2"]) == 0
    assert re.search(r"rank 2 draws [\d,]{9,} values in", capsys.readouterr().out)
    assert main(["channel", "--ranks", "6"]) == 0
    group, channel = (int(count) for count in re.findall(r"(\d+) sockets a rank", capsys.readouterr().out))
    assert channel == 1 < 5 <= group
