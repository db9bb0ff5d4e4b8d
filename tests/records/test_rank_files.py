"""Files of ranks: of few in one folder, of many in a folder for each node; both are found again."""

from pathlib import Path

from launch.slurm.control import logs
from launch.slurm.job.preflight import Arrivals, read_reports
from launch.slurm.job.srun import StepEnd, last_words, srun_command
from launch.slurm.jobspec import JobSpec
from pipeline.files import write_json
from pipeline.records.hangs import count_records, read_hang
from pipeline.records.rank_files import FLAT, node_folders, own_folder
from pipeline.training.watchdog import Watchdog

PER_NODE = 8
RANKS = 16_384


def spec(folder, ranks):
    return JobSpec(str(folder), "x-train", "train", ("python",), "c", nodes=max(1, ranks // PER_NODE), ranks=ranks,
                   tasks_per_node=PER_NODE)


def output(command):
    return next(word for word in command if word.startswith("--output="))


def test_few_ranks_write_into_one_folder_and_many_into_one_for_each_node(tmp_path):
    assert node_folders(tmp_path, FLAT, 64) == [tmp_path] == [own_folder(tmp_path, FLAT, {"GROUP_RANK": "9"})]
    folders = node_folders(tmp_path, RANKS, RANKS // PER_NODE)
    assert len(folders) == 2048 and own_folder(tmp_path, RANKS, {"GROUP_RANK": "2047"}) == folders[-1]
    few, many = (srun_command(spec(tmp_path, ranks), tmp_path / str(ranks), ["true"]) for ranks in (FLAT, RANKS))
    assert output(few).endswith(f"/{FLAT}/rank%t.out") and output(many).endswith(f"/{RANKS}/node%n/rank%t.out")
    assert not list((tmp_path / str(FLAT)).iterdir())
    assert sorted((tmp_path / str(RANKS)).iterdir()) == sorted(node_folders(tmp_path / str(RANKS), RANKS, 2048))


def test_logs_of_many_ranks_are_found(tmp_path, capsys):
    folder = tmp_path / "logs/train/16.0"
    path = folder / "node12/rank97.err"
    path.parent.mkdir(parents=True)
    path.write_text("it broke\n")
    (folder.parent / "latest").symlink_to("16.0")
    said = "srun: error: n12: task 97: Exited with exit code 1\n"
    assert last_words(folder, StepEnd(1, said), 5) == ["rank 97: it broke"]
    assert logs(tmp_path, "train", rank=97) == 0
    assert capsys.readouterr().out.endswith("it broke\n")


def test_reports_of_many_ranks_are_found(tmp_path):
    for rank in range(0, 24, 5):
        write_json(tmp_path / f"node{rank // PER_NODE}/rank-{rank}.json", {"rank": rank, "node": "n", "problems": []})
    arrivals = Arrivals(tmp_path, [])
    arrivals.look()
    assert [report.rank for report in read_reports(tmp_path)] == [0, 5, 10, 15, 20] == sorted(arrivals._ranks)


def test_records_of_a_hang_of_many_ranks_are_found_beside_those_of_old_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "3")
    Watchdog(tmp_path, 25, None, RANKS)._write(1.0)
    assert {path.parent.relative_to(tmp_path) for path in tmp_path.rglob("rank*")} == {Path("node3")}
    Watchdog(tmp_path, 2, None, 4)._write(1.0)
    assert [record.rank for record in read_hang(tmp_path)] == [2, 25] and count_records(tmp_path) == 2
