"""`drover plan --as`: what Kubernetes and SkyPilot would get. The schemas were applied by hand (docs/kubernetes.md)."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from drover.launch.submit import show_plan
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.stage_work import processes
from drover.pipeline.contract.stages import STAGES
from tests import refusal
from tests.conftest import REPOSITORY
from tests.pages import commands
from tests.stages.training import manifest_of
from tests.waiting import HANG_S

CLOUD = """
name: My_Run
shard: {sources: [{kind: files, name: t, paths: [/data/text/*.txt]}]}
launch:
  container: {image: registry/drover:1, mounts: [runs-claim:/data, "scratch:/scratch"]}
  gpus_per_node: 8
  gpu_type: H100
  cpus: 4
  mem: 128G
  max_restarts: 7
  setup: [export A=b]
  environment: {NCCL_DEBUG: INFO}
  secrets: [HF_TOKEN]
train: {sequence_length: 64, batch_tokens: 4096}
"""


TRAINING = """
name: stage
image: registry/drover:1
workingDir: /data
command:
- bash
- -c
- |-
  set -e
  export A=b
  exec python -m torch.distributed.run --nnodes=2 --node-rank=$JOB_COMPLETION_INDEX \
--master-addr=my-run-train-0-0.my-run --master-port=29500 --nproc-per-node=8 -m drover.pipeline.train \
--config /etc/drover/config.yaml
env:
- {name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: '120'}
- {name: NCCL_DEBUG, value: INFO}
- {name: OMP_NUM_THREADS, value: '4'}
- {name: PYTHONUNBUFFERED, value: '1'}
- {name: DROVER_LAUNCHED, value: '1'}
- {name: DROVER_CPUS, value: '32'}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: my-run, key: HF_TOKEN, optional: false}}}
- {name: DROVER_STORE_SECRET, valueFrom: {secretKeyRef: {name: my-run, key: DROVER_STORE_SECRET, optional: true}}}
resources:
  requests: {cpu: 32, memory: 128Gi, nvidia.com/gpu: 8}
  limits: {nvidia.com/gpu: 8}
volumeMounts:
- {name: config, mountPath: /etc/drover/config.yaml, subPath: config.yaml}
- {name: shm, mountPath: /dev/shm}
- {name: volume-0, mountPath: /data}
- {name: volume-1, mountPath: /scratch}
"""
"""A container of training's pods, but for the id of the submission."""
TASK = """
name: train
workdir: .
num_nodes: 2
resources:
  accelerators: H100:8
  cpus: 32+
  memory: 1024+
  image_id: docker:registry/drover:1
  job_recovery: {max_restarts_on_errors: 7}
volumes: {/data: runs-claim, /scratch: scratch}
envs: {NCCL_DEBUG: INFO, OMP_NUM_THREADS: '4', PYTHONUNBUFFERED: '1', DROVER_LAUNCHED: '1', DROVER_CPUS: '32'}
secrets: {HF_TOKEN: null}
run: |
  set -e
  export A=b
  exec python -m torch.distributed.run --nnodes=2 --node-rank=$SKYPILOT_NODE_RANK \
--master-addr="$(head -n1 <<< "$SKYPILOT_NODE_IPS")" --master-port=29500 --nproc-per-node=8 -m drover.pipeline.train \
--config run.yaml train.lr=1e-3 launch.mem=1T launch.train.nodes=2 runs_dir=/data/runs
"""
"""The task of training."""


@pytest.fixture
def asked(tmp_path, monkeypatch, capsys):
    """What the command says of run.yaml, or of another configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CLOUD)

    def say(form, *arguments, expect=0):
        given = ["--config", "run.yaml"] if "--config" not in arguments else []
        return refusal.printed(capsys, show_plan, "--as", form, *given, *arguments, expect=expect)

    return say


@pytest.fixture
def printed(asked):
    """The documents that it prints."""
    return lambda *arguments: [*yaml.safe_load_all(asked(*arguments))]


def pod(job):
    """What a job's pods are."""
    return job["template"]["spec"]["template"]["spec"]


def test_a_jobset_has_a_job_for_each_stage(printed, tmp_path, monkeypatch):
    settings, jobset = printed("jobset", "--nodes", "2")
    assert (settings["kind"], jobset["kind"], jobset["metadata"]["name"]) == ("ConfigMap", "JobSet", "my-run")
    jobs = {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}
    assert [*jobs] == [*STAGES]
    assert [[need["name"] for need in job.get("dependsOn", [])] for job in jobs.values()] == [
        [], *([before] for before in [*STAGES][:-1])]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert {name: job["template"]["spec"]["completions"] for name, job in jobs.items()} == {
        **dict.fromkeys(STAGES, 1), "train": 2}
    container, = pod(jobs["train"])["containers"]
    assert container["env"].pop(4)["name"] == "DROVER_CHAIN" and container == yaml.safe_load(TRAINING)
    assert "--nnodes=1 --node-rank=$JOB_COMPLETION_INDEX --master-addr=my-run-evaluate-0-0.my-run " in pod(
        jobs["evaluate"])["containers"][0]["command"][2]
    shard = pod(jobs["shard"])["containers"][0]
    assert (shard["resources"]["limits"], shard["workingDir"]) == ({}, "/data")
    assert {one["name"]: one.get("value") for one in shard["env"]}["DROVER_CPUS"] == "4"
    monkeypatch.setenv("DROVER_CPUS", "1")
    assert processes(load_config("run.yaml", check=False)) == 1, "although the pod sees all cores of its node"
    (tmp_path / "frozen.yaml").write_text(settings["data"]["config.yaml"])
    assert load_config("frozen.yaml", check=False) == load_config("run.yaml", ["launch.train.nodes=2"], check=False)


def test_a_pipeline_of_skypilot_has_a_task_for_each_stage(printed):
    name, *tasks = printed("skypilot", "--nodes", "2", "--stage", "encode,train", "train.lr=1e-3", "launch.mem=1T")
    assert {task["envs"].pop("DROVER_CHAIN")[:2] for task in tasks} == {"20"}
    assert (name, [task["name"] for task in tasks]) == ({"name": "My_Run"}, ["encode", "train"])
    assert "accelerators" not in tasks[0]["resources"] and tasks[1] == yaml.safe_load(TASK)


def test_kubernetes_takes_every_name_and_value(printed):
    settings, jobset = printed("jobset", "--stage", "shard", "name=8b.Run", "launch.mem=null", "launch.setup=[echo $$]",
                               "launch.environment={A: $(B)}")
    spec = pod(jobset["spec"]["replicatedJobs"][0])
    assert jobset["metadata"]["name"] == "run-8b-run", "names of jobs begin with a letter"
    assert spec["containers"][0]["command"][2].splitlines()[1] == "echo $$$$", "$$ is a $ there"
    assert spec["containers"][0]["env"][0] == {"name": "A", "value": "$$(B)"}
    assert spec["volumes"][0]["configMap"]["name"] == settings["metadata"]["name"]
    other, _ = printed("jobset", "--stage", "shard", "name=8b.Run", "train.lr=1e-3")
    assert other["metadata"]["name"] != settings["metadata"]["name"], "pods that start again keep their settings"


def test_the_files_of_plugins_are_next_to_the_configuration(printed, tmp_path, no_plugins):
    (tmp_path / "helper_of_pods.py").write_text("A = 1\n")
    (tmp_path / "plugin_of_pods.py").write_text("from helper_of_pods import A\n")
    settings, jobset = printed("jobset", "--stage", "shard", "plugins=[plugin_of_pods.py]")
    assert {name: text for name, text in settings["data"].items() if name != "config.yaml"} == {
        "helper_of_pods.py": "A = 1\n", "plugin_of_pods.py": "from helper_of_pods import A\n"}
    spec = pod(jobset["spec"]["replicatedJobs"][0])
    assert {"name": "config", "mountPath": "/etc/drover/plugin_of_pods.py", "subPath": "plugin_of_pods.py"
            } in spec["containers"][0]["volumeMounts"]


def test_a_plugin_with_a_secret_is_not_printed(asked, tmp_path, no_plugins):
    (tmp_path / "leaky_of_pods.py").write_text(f"TOKEN = 'hf_{'aB3' * 12}'\n")
    said = asked("jobset", "plugins=[leaky_of_pods.py]", expect=2)
    assert "leaky_of_pods.py contains what looks like a secret" in said


def test_text_is_quoted_that_another_reader_takes_for_a_number(asked):
    said = asked("jobset", "launch.environment={A: '1e3', B: y}")
    assert "value: '1e3'" in said
    assert "value: 'y'" in said
    assert "*id" not in said, "each pod is readable by itself"


@pytest.mark.parametrize("words, said", refusal.table("""
    jobset --cluster slurm -> Leave out --json and --cluster slurm
    jobset launch.container={} launch.wrap=[env] -> Pods need an image | runs/My_Run is in no volume | launch.wrap and \
launch.srun_args are for
    skypilot launch.gpu_type=null launch.device=mps launch.gpus_per_node=0 launch.train.gpus_per_node=8 \
launch.container.mounts=[/folder:/data] -> Set launch.gpu_type | launch.container.mounts is CLAIM:/FOLDER there | \
launch.device=mps is Apple | the configuration ../run.yaml is outside of it
    jobset runs_dir=/elsewhere -> /elsewhere/My_Run is in no volume
    jobset runs_dir=/data2 -> /data2/My_Run is in no volume
    jobset runs_dir=/zoo -> /zoo/My_Run is in no volume"""))
def test_what_cannot_run_there_is_refused_at_once(asked, tmp_path, monkeypatch, words, said):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    complaint = asked(*words.split(), "--config", "../run.yaml", expect=2)
    assert all(part in complaint for part in said.split(" | ")), complaint


def test_training_that_does_not_fit_is_refused_unless_it_is_asked_for(asked):
    small = ("jobset", "--stage", "train", "launch.limits.gpu_memory_gb=0.001")
    assert "launch.check_fit=false starts it anyway" in asked(*small, expect=2)
    assert "kind: JobSet" in asked(*small, "launch.check_fit=false")


def test_the_pages_commands_print_its_configuration(printed, tmp_path):
    text = (REPOSITORY / "docs/kubernetes.md").read_text()
    (tmp_path / "cloud.yaml").write_text(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    plans = [shlex.split(command) for command in commands("kubernetes") if command.startswith("drover plan")]
    assert [(words[3], len(printed(words[3], *words[4:-2]))) for words in plans] == [("jobset", 2), ("skypilot", 8)]


@pytest.mark.slow
def test_two_pods_train(printed, fresh, tmp_path):
    """Their scripts are run here: one has another address for the first pod, and the ConfigMap is a file."""
    settings, jobset = printed("jobset", "--nodes", "2", "--stage", "train", "--config", fresh, "launch.processes=1",
                               f"launch.python={sys.executable}",
                               f"launch.container={{image: i, mounts: ['claim:{tmp_path}']}}")
    (tmp_path / "frozen.yaml").write_text(settings["data"]["config.yaml"])
    container = pod(jobset["spec"]["replicatedJobs"][0])["containers"][0]
    script = (container["command"][2].replace("mini-train-0-0.mini", "127.0.0.1")
              .replace("/etc/drover/config.yaml", str(tmp_path / "frozen.yaml")))
    given = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    pods = [subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env={**os.environ, **given, "JOB_COMPLETION_INDEX": str(index)}) for index in (0, 1)]
    said = [pod.communicate(timeout=HANG_S)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert manifest_of(fresh).counts["steps"] == 12
