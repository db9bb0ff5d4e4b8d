"""What is asked of Slurm: time limits, cluster profiles, and the stage's wishes over those for all stages."""

import pytest
import yaml

from drover.launch.plan import resources_of
from drover.pipeline.config.loading import load_config
from drover.pipeline.core.console import minutes
from tests.config.files import refusal
from tests.conftest import REPOSITORY
from tests.refusal import table


@pytest.mark.parametrize(("time", "expected"), table("""
    90 -> 90
    30:01 -> 31
    1:30:00 -> 90
    0:00:01 -> 1
    2-00 -> 2880
    1-12:30 -> 2190
    1-00:00:30 -> 1441""", str, int))
def test_every_notation_of_a_time_limit(time, expected):
    assert minutes(time) == minutes(expected) == expected


@pytest.mark.parametrize("time", ["soon", "", "1-", "12:30:00:00", "-5", 0, "0:00", 90.5, "2h", True, [60]])
def test_what_is_no_time_limit_is_refused_with_its_place(written, time):
    path = written({"launch": {"train": {"time": time}}})
    message = refusal(path)
    assert "c.yaml:3: 'launch.train.time'" in message and "is no time" in message and "valid" not in message


@pytest.mark.parametrize(("given", "taken"), table("""
    {mem: 64g, time: 1-12, partition: "a,b"} -> {mem: 64g, time: 2160, partition: "a,b"}
    {mem: 0} -> {mem: "0"}
    {mem: 64GB} -> {mem: 64GB}
    {mem: 6000, partition: [a, b]} -> {mem: "6000", partition: "a,b"}
    {mem: 2T, exclude: [n1, n2]} -> {mem: 2T, exclude: "n1,n2"}
    {train: {mem: 500K, extra: {nodelist: [n1, n2], exclusive: true, nice: 9}}} -> {train: {mem: 500K, extra: \
{nodelist: "n1,n2", exclusive: true, nice: 9}}}""", *[yaml.safe_load] * 2))
def test_what_slurm_takes_is_taken(written, given, taken):
    def part(values, launch):
        return {name: part(value, getattr(launch, name)) if name == "train" else getattr(launch, name)
                for name, value in values.items()}

    launch = load_config(written({"launch": given})).launch
    assert part(taken, launch) == taken
    assert load_config(written({}), ["launch.exclude=[n1,n2]", "launch.mem=64g"]).launch.exclude == "n1,n2"


PROFILE = """
partition: gpu
time: 1-00:00:00
environment: {NCCL_DEBUG: WARN, A: profile}
setup: [module load cuda]
train: {nodes: 8, partition: big}
"""


def test_a_profile_is_laid_under_the_runs_own_settings(written):
    written(PROFILE, "clusters/ours.yaml")
    path = written({"launch": {"cluster": "ours", "time": 60, "environment": {"A": "run"}}})
    launch = load_config(path, ["launch.train.nodes=4"]).launch
    assert (launch.partition, launch.time, launch.setup) == ("gpu", 60, ["module load cuda"])
    assert launch.environment == {"NCCL_DEBUG": "WARN", "A": "run"}
    assert (launch.train.nodes, launch.train.partition) == (4, "big")
    assert launch.cluster is None


@pytest.mark.parametrize(("profile", "name", "message"), table("""
    {partion: gpu} -> ours -> ours.yaml:1: unknown key 'launch.partion'; did you mean 'launch.partition'
    {launch: {partition: gpu}} -> ours -> unknown key 'launch.launch'; did you mean 'launch'
    {} -> theirs -> It is the cluster profile of the command line (launch.cluster=theirs). Give a file, or one of
    {} -> theirs -> `drover doctor --write configs/clusters/NAME.yaml` writes one for your site.
    {} -> theirs -> example, lab, ours""", yaml.safe_load))
def test_mistakes_in_a_profile_are_named_with_its_line(written, profile, name, message):
    written(profile, "clusters/ours.yaml")
    assert message in refusal(written({}), f"launch.cluster={name}")


def test_profiles_and_shipped_configurations_are_found_from_a_folder_of_ones_own(written, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    written("partition: mine", "configs/clusters/here.yaml")
    assert load_config("configs/demo.yaml", ["launch.cluster=here"]).launch.partition == "mine"
    assert load_config(written("base: configs/demo.yaml")).name == "demo"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs/clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_profiles_load(path):
    config = load_config(REPOSITORY / "configs/demo.yaml", [f"launch.cluster={path}"])
    assert resources_of(config.launch, "train").partition == yaml.safe_load(path.read_text())["partition"]


def test_a_stage_wishes_over_all(written):
    launch = load_config(written("""
launch:
  {partition: gpu, mem: "0", time: 240, cpus: 12, gpus_per_node: 8, extra: {comment: x, a: "1"},
   encode: {partition: cpu, mem: 64G, extra: {a: "2"}, array: 3, at_once: 2},
   evaluate: {gpus_per_node: 1, time: "2:00:00"}}
""")).launch
    encode, train, evaluate = (resources_of(launch, stage) for stage in ("encode", "train", "evaluate"))
    assert (encode.partition, encode.mem, encode.cpus, encode.time, encode.at_once) == ("cpu", "64G", 12, 240, 2)
    assert encode.extra == {"comment": "x", "a": "2"} and train.extra == {"comment": "x", "a": "1"}
    assert (train.partition, train.gpus_per_node) == ("gpu", 8)
    assert (evaluate.gpus_per_node, evaluate.time) == (1, 120)
