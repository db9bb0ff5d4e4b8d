"""The chain for a cloud, as text: a Kubernetes JobSet, or a pipeline of SkyPilot's managed jobs. Nothing is sent.

Each stage is a job that begins when the one before has ended well. torchrun starts its ranks. A failed stage starts
again, up to `launch.max_restarts` times, and continues: stages that are done end at once.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from drover.launch.checks import configuration_problems, device_problems, megabytes, memory_problems, refuse_all
from drover.launch.credentials import credential_problems, files_with_secrets
from drover.launch.plan import Job, Options, plan
from drover.pipeline.config.loading import dump_config
from drover.pipeline.config.plugins import plugin_files
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.run import Run, State
from drover.pipeline.contract.signed import SECRET
from drover.pipeline.contract.stages import parse_stages
from drover.pipeline.core.files import sha256_json

SETTINGS = PurePosixPath("/etc/drover/config.yaml")
"""The configuration inside a pod."""
LONGEST_NAME = 40
"""Most characters of a JobSet's name. Its pods' names add the stage and numbers, and may have 63."""
_CLAIM = re.compile("[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
REFUSED = 2
"""Exit status of a stage that refuses its settings: to start it again would not help."""
PORT = 29500
AFTER_RANKS_S = 15
"""How long torchrun and the container may take to end after the ranks."""


def manifest(config: Config, stages: str, options: Options, form: str) -> str:
    """The documents for `form`, a key of FORMS, as YAML.

    options: `cluster` is "hosts". All starts of what is printed have its `chain`.

    Raises:
        UserError: the configuration has problems, or cannot run there; all are named.
    """
    if form == "jobset":
        options = replace(options, frozen=str(SETTINGS))
    else:  # the task's folder is a copy of this one, but the run is to be in a volume
        options = replace(options, config_path=os.path.relpath(options.config_path),
                          overrides=(*options.overrides, f"runs_dir={_work(config) / config.runs_dir}"))
    # A run of this name on this machine is another one.
    jobs = [replace(job, state=State("to do")) for job in plan(config, Run(config), parse_stages(stages), options)]
    configuration_problems(config, jobs, options.config_path, here=False)
    memory = memory_problems(config, jobs, options) if config.launch.check_fit else ()
    refuse_all("This cannot be printed", [
        *credential_problems(config, os.environ), *device_problems(config), *memory,
        *_problems(config, jobs, form, options.config_path)])
    return yaml.dump_all(FORMS[form](config, jobs), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _problems(config: Config, jobs: list[Job], form: str, path: str) -> Iterator[str]:
    launch, volumes = config.launch, _volumes(config)
    if form == "jobset" and launch.container.image is None:
        yield "Pods need an image. Set launch.container.image to one that contains Drover (the Dockerfile builds it)."
    if form == "skypilot" and launch.gpu_type is None and any(job.gpus_per_node for job in jobs):
        yield "SkyPilot selects machines by the type of GPU. Set launch.gpu_type, for example to H100."
    if form == "skypilot" and path.startswith(".."):
        yield (f"SkyPilot copies the working directory, but the configuration {path} is outside of it. Give the "
               f"command in a folder that contains it.")
    if not all(_CLAIM.fullmatch(claim) and inside.startswith("/") for inside, claim in volumes.items()):
        yield "launch.container.mounts is CLAIM:/FOLDER there: the name of a volume, and where the stages see it."
    elif not any((_work(config) / config.folder).is_relative_to(inside) for inside in volumes):
        yield (f"{config.folder} is in no volume, so it would be lost with its pod. Name a volume that all stages can "
               f"write, such as launch.container.mounts=[my-claim:/data]; a relative runs_dir lies in the first one.")
    for plugin in _plugins(config) if form == "jobset" else ():
        for what in files_with_secrets(plugin.parent, [Path(plugin.name)]).values():
            yield f"{plugin} contains what looks like a secret ({what}), and would be printed. Use launch.secrets."
    if launch.wrap or launch.srun_args:
        yield "launch.wrap and launch.srun_args are for Slurm and hosts. Leave them out."


def _volumes(config: Config) -> dict[str, str]:
    """The names of the volumes, by the folders where the stages see them."""
    return {inside: claim for claim, _, inside in (mount.rpartition(":") for mount in config.launch.container.mounts)}


def _work(config: Config) -> PurePosixPath:
    """The stages' working directory: the first volume."""
    return PurePosixPath(next(iter(_volumes(config)), "/"))


def _script(config: Config, job: Job, rank: str, address: str) -> str:
    """What one node runs. rank, address: shell words for its number, and for the name of the first node."""
    python, starter = config.launch.python or "python", ""
    if job.ranks > 1:
        starter = (f"-m torch.distributed.run --nnodes={job.nodes} --node-rank={rank} --master-addr={address} "
                   f"--master-port={PORT} --nproc-per-node={job.tasks_per_node} ")
    command = f"exec {shlex.quote(python)} {starter}{shlex.join(job.command[1:])}"
    return "\n".join(["set -e", *config.launch.setup, command])


def _label(name: str) -> str:
    """The name as Kubernetes allows it: it begins with a letter."""
    label = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"run-{label}")[:LONGEST_NAME].rstrip("-")


def _environment(job: Job) -> dict[str, str]:
    """Variables of the job, but not PYTHONPATH: the image has the code. As in Slurm's chains, a stage waits for files
    and locks of another node, and uses its own cores only."""
    return {**{name: value for name, value in job.environment.items() if name != "PYTHONPATH"},
            "PYTHONUNBUFFERED": "1", "DROVER_CHAIN": job.chain, "DROVER_LAUNCHED": "1", "DROVER_CPUS": str(_cpus(job))}


def _cpus(job: Job) -> int:
    """Cores of a node that the job needs."""
    return job.tasks_per_node * job.cpus_per_task


def _literal(text: str) -> str:
    """The text as Kubernetes must get it in a command or variable: it would replace $(NAME) and $$."""
    return re.sub(r"\$+(?=\()|\${2,}", lambda found: 2 * found[0], text)


def _plugins(config: Config) -> list[Path]:
    """The plugins that are files, and what they import from their folders. A stage also looks for them next to its
    configuration."""
    folders = {Path(name).parent for name in config.plugins if name.endswith(".py")}
    return [path for path in plugin_files() if path.parent in folders]


def _jobset(config: Config, jobs: list[Job]) -> Iterator[dict[str, Any]]:
    """A ConfigMap with the whole configuration and its plugins, and the JobSet."""
    launch = config.launch
    name = _label(config.name)
    settings = {SETTINGS.name: dump_config(config), **{path.name: path.read_text() for path in _plugins(config)}}
    # A name for each content: pods that start again must not get the settings of a later submission.
    own = f"{name}-{sha256_json(settings)[:8]}"

    def pod(job: Job) -> dict[str, Any]:
        gpus = {"nvidia.com/gpu": job.gpus_per_node} if job.gpus_per_node else {}
        memory = job.asked.mem if job.asked.mem != "0" else None
        asked = {"cpu": _cpus(job),
                 **({"memory": f"{memory}i" if memory[-1].isalpha() else f"{memory}Mi"} if memory else {}), **gpus}
        # By default, torchrun kills its ranks 30 s after a request to end.
        variables = {**({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launch.signal_s)} if job.ranks > 1 else {}),
                     **_environment(job)}
        volumes = {**({"shm": ("/dev/shm", {"emptyDir": {"medium": "Memory"}})} if job.ranks else {}),
                   **{f"volume-{number}": (inside, {"persistentVolumeClaim": {"claimName": claim}})
                      for number, (inside, claim) in enumerate(_volumes(config).items())}}
        return {"restartPolicy": "Never", "terminationGracePeriodSeconds": launch.signal_s + AFTER_RANKS_S,
                "containers": [{
                    "name": "stage", "image": launch.container.image, "workingDir": str(_work(config)),
                    "command": ["bash", "-c", _literal(_script(config, job, "$JOB_COMPLETION_INDEX",
                                                                f"{name}-{_label(job.stage)}-0-0.{name}"))],
                    "env": [*({"name": key, "value": _literal(value)} for key, value in variables.items()),
                            *({"name": key, "valueFrom": {"secretKeyRef": {
                                "name": name, "key": key, "optional": key not in launch.secrets}}}
                              for key in dict.fromkeys([*launch.secrets, SECRET]))],
                    "resources": {"requests": asked, "limits": gpus},
                    # One by one: a folder would have another path in each pod, and ranks compare paths of plugins.
                    "volumeMounts": [
                        *({"name": "config", "mountPath": str(SETTINGS.with_name(file)), "subPath": file}
                          for file in settings),
                        *({"name": volume, "mountPath": inside} for volume, (inside, _) in volumes.items())],
                }],
                "volumes": [{"name": "config", "configMap": {"name": own}},
                            *({"name": volume, **source} for volume, (_, source) in volumes.items())]}

    def replicated(job: Job, before: Job | None) -> dict[str, Any]:
        spec = {"completionMode": "Indexed", "completions": job.nodes, "parallelism": job.nodes, "backoffLimit": 0,
                "podFailurePolicy": {"rules": [
                    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [REFUSED]}}]},
                "template": {"spec": pod(job)}}
        return {"name": _label(job.stage), "template": {"spec": spec},
                **({"dependsOn": [{"name": _label(before.stage), "status": "Complete"}]} if before else {})}

    yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": own}, "immutable": True,
           "data": settings}
    yield {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": {
        "failurePolicy": {"maxRestarts": launch.max_restarts, "restartStrategy": "BlockingRecreate", "rules": [
            {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]},
        "replicatedJobs": [replicated(job, before) for job, before in zip(jobs, [None, *jobs], strict=False)]}}


def _skypilot(config: Config, jobs: list[Job]) -> Iterator[dict[str, Any]]:
    """The name of the pipeline, then a task for each stage."""
    launch = config.launch
    yield {"name": config.name}
    for job in jobs:
        memory = math.ceil(megabytes(job.asked.mem) / 1024)
        resources = {"accelerators": f"{launch.gpu_type}:{job.gpus_per_node}" if job.gpus_per_node else None,
                     "cpus": f"{_cpus(job)}+", "memory": memory and f"{memory}+",
                     "image_id": launch.container.image and f"docker:{launch.container.image}",
                     "job_recovery": {"max_restarts_on_errors": launch.max_restarts}}
        task = {"name": job.stage, "workdir": ".", "num_nodes": job.nodes,
                "resources": {name: value for name, value in resources.items() if value},
                "volumes": _volumes(config), "envs": _environment(job), "secrets": dict.fromkeys(launch.secrets),
                "run": _script(config, job, "$SKYPILOT_NODE_RANK", '"$(head -n1 <<< "$SKYPILOT_NODE_IPS")"') + "\n"}
        yield {name: value for name, value in task.items() if value}


FORMS: dict[str, Callable[[Config, list[Job]], Iterator[dict[str, Any]]]] = {"jobset": _jobset, "skypilot": _skypilot}
"""What can be printed, by the value of --as."""


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such, and quotes what another reader of YAML may take for a number (1e3) or a
    truth value (y)."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else "'" if re.match(r"[-+.]?\d|[yYnN]$", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
