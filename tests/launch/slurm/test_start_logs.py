"""Logs of starts: few files, of which each rank's lines are found, whole."""

import pytest

from drover.launch.slurm.start_logs import MOST, PIECE, last_word, output


@pytest.mark.parametrize("text, whole", [
    ("0: a\n1: b\n 1: c\n10: d\n1: \n11: 1: e\n", "b\nc\n\n"),
    (f"1: {'x' * PIECE}\n2: {'y' * PIECE}\n1: {'z' * PIECE}\n2: y\n1: end\n",
     f"{'x' * PIECE}{'z' * PIECE}end\n"),
    ("slurmstepd: error: 1: no label\n1: a: b\n", "a: b\n")])
def test_the_lines_of_one_rank(tmp_path, text, whole):
    path = tmp_path / "node0.log"
    path.write_text(text)
    with open(path, "rb") as file:
        assert b"".join(output(file, 1)).decode() == whole


@pytest.mark.parametrize("lines, word", [
    ([], ""),
    (["rank 1: Traceback", "rank 1: KeyError: 'a'"], "rank 1: KeyError: 'a'"),
    (["rank 0: error: shard: 2 problems:", "rank 0:   - one", "rank 0:   - two"],
     "rank 0: error: shard: 2 problems: - one - two"),
    (["rank 0: error: first", "rank 0: error: second"], "rank 0: error: second"),
    (["corpus " * 300], f"{' '.join(['corpus'] * ((MOST - 4) // 7))} ...")])
def test_what_a_rank_said_last_is_not_cut_within_a_word(lines, word):
    assert last_word(lines) == word
