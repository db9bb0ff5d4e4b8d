"""What a job requests: the parameters of submitit's executor, the setting that decides each option of sbatch, and those
that a user may add in `launch.extra`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drover.launch.plan import OPTIONS, Job
from drover.launch.slurm.chain import token
from drover.launch.slurm.scheduler import literal
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.config.plugins import plugin_folders
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import sha256_json

FOLDER = Path("launch") / "submitit"
"""Submitit's folder in the run: scripts, pickles, results, and the logs of the jobs themselves."""
SPECS = Path("launch") / "jobs"
RANKS = "launch.gpus_per_node or launch.processes"
NONE = ""
SRUN = ("label", "overlap", "distribution", "kill-on-bad-exit")
"""Options of srun that the launcher sets, besides those that sbatch has as well."""
DECIDED = {
    "array": "launch.<stage>.array", "chdir": NONE, "clusters": NONE,
    "cpus-per-gpu": "launch.cpus", "cpus-per-task": "launch.cpus", "error": NONE, "exclude": "launch.exclude",
    "export": "launch.environment and launch.secrets", "export-file": "launch.environment and launch.secrets",
    "job-name": "name", "kill-on-invalid-dep": NONE, "mem": "launch.mem", "no-requeue": "launch.requeue: false",
    "nodes": "launch.train.nodes", "ntasks": RANKS, "ntasks-per-gpu": RANKS, "ntasks-per-node": RANKS,
    "open-mode": NONE, "output": NONE, "parsable": NONE, "partition": "launch.partition",
    "requeue": "launch.requeue", "signal": "launch.signal_s", "test-only": "--dry-run (of submit.py)",
    "time": "launch.time", "wait": NONE, "wrap": NONE}
"""Options that the launcher sets, or that must not be set, and the setting that decides each (NONE: no setting)."""
GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")
"""Options that request GPUs and can name their type (`gpu:h100:8`). The number must equal `gpus_per_node`."""


SETUP = (
    "in_setup=${#BASH_SOURCE[@]} at= first=$((LINENO + 2))",
    """trap 'code=$?; [ "${#BASH_SOURCE[@]}" != "$in_setup" ] || { at=$LINENO; exit $code; }' ERR""",
    """trap 'code=$? text=${at:+line $((at - first)), $(sed -n "${at}p" "$0" 2> /dev/null)}; [ -z "$in_setup" ] || { """
    """echo "launch.setup failed with exit status $code (${text:-$BASH_COMMAND}). Correct it, or end a line that may """
    """fail with || true." >&2; exit $((code ? code : 1)); }' EXIT""")
"""Lines before those of `launch.setup`. LINENO is known where a command fails, not where `exit` or `set -u` ends it."""


def outer_python(launch: LaunchConfig, contained: bool) -> str:
    """The Python outside of a container, as a shell word. contained: whether the stages run in one."""
    return shlex.quote(launch.runner_python or (None if contained else launch.python) or sys.executable)


def setup_lines(launch: LaunchConfig) -> list[str]:
    """`launch.setup`, as lines of bash: one that fails ends the script and is named. What fails inside of a condition,
    of a function or of a sourced file is their own business. `set -e` ends with them: what follows looks at its status.
    """
    return [*SETUP, *launch.setup, "in_setup=; set +e"] if launch.setup else []


def setup_problems(launch: LaunchConfig) -> Iterator[str]:
    """What bash cannot read in `launch.setup`: an `if` or a quotation mark that nothing closes would end in the lines
    of the script after it."""
    answer = subprocess.run(["/bin/bash", "-O", "extglob", "-n"], input="\n".join(launch.setup) + "\n", env={},
                            capture_output=True, text=True, check=False, errors="replace")
    if answer.stderr:
        yield (f"launch.setup is no script that bash can read: {answer.stderr.splitlines()[0].partition(': ')[2]}. "
               f"Correct that line, counted in launch.setup.")


def preamble(launch: LaunchConfig) -> list[str]:
    """What a script does first: `launch.setup`, then `launch.environment`, which overrides it, as in the ranks."""
    return [*setup_lines(launch),
            *(f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items())]


def long_options(extra: Mapping[str, str | int | bool]) -> dict[str, str | bool]:
    """Options under sbatch's long names: True for one without a value (`exclusive: true`). Options that are false are
    left out."""
    return {key.lstrip("-").replace("_", "-"): value is True or str(value)
            for key, value in extra.items() if value is not False}


def options_of(job: Job) -> dict[str, str | bool]:
    """The options that the user adds to a job. Jobs without ranks need no GPUs: options that request them are left out.
    """
    found = long_options(job.asked.extra or {})
    if job.ranks or job.gpus_per_node:
        return found
    others = ",".join(part for part in str(found.get("gres", "")).split(",") if not _is_gpu(part))
    rest = {name: value for name, value in found.items() if name not in GPUS}
    return {**rest, "gres": others} if others else rest


def gpus_asked(job: Job) -> tuple[str, float] | None:
    """The option of the job's `extra` that requests GPUs, and how many per node; None if there is none."""
    for name, value in options_of(job).items():
        for part in str(value).split(",") if name in GPUS else ():
            if name != "gres" or _is_gpu(part):
                number = part.rpartition(":")[2]
                count = int(number) if number.isdigit() else 1
                per_node = {"gpus": count / job.all_nodes, "gpus-per-task": count * job.tasks_per_node}
                return name, per_node.get(name, count)
    return None


def spec_path(config: Config, job: Job) -> Path:
    return config.folder.absolute() / SPECS / f"{job.chain}-{job.key}.json"


def parameters(config: Config, job: Job, ids: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of submitit's SlurmExecutor for a job (docs/slurm.md has the table). Those without a value are
    left out, except `wckey`: submitit would set one.

    ids: of the jobs that it depends on, by their keys.
    """
    launch = config.launch
    extra = options_of(job)
    waits = [f"afterok:{':'.join(ids[need] for need in job.dependencies)}"] if job.dependencies else []
    waits += [f"afterany:{ids[job.follows]}"] if job.follows else []
    waits += ["singleton"] if job.stage == "train" else []  # two jobs of one run never train at once
    waits += [str(extra.pop("dependency"))] if "dependency" in extra else []
    # Singleton goes by the name of the job alone: a run of this name in another folder must not be waited for.
    own = f"-{sha256_json(str(config.folder.resolve()))[:6]}" if job.stage == "train" else ""
    kind = f"{launch.gpu_type}:" if launch.gpu_type else ""
    gpus = f"{kind}{job.gpus_per_node}" if job.gpus_per_node and launch.request_gpus and not gpus_asked(job) else None
    log = "%A_%a_0_log.out" if job.elements else "%j_0_log.out"
    # The runner starts the ranks itself, by srun, again and again in one job: submitit starts it without srun.
    named = {
        "job_name": job.name + own, "time": job.minutes, "nodes": job.all_nodes,
        "ntasks_per_node": job.tasks_per_node, "cpus_per_task": job.cpus_per_task, "gpus_per_node": gpus,
        "mem": job.asked.mem, "partition": job.asked.partition, "dependency": ",".join(waits),
        **{name: extra.pop(name, None) for name in (*OPTIONS, "exclude")},
        "comment": f"{token(job.chain, job.key)} {extra.pop('comment', '')}".rstrip(),
        "signal_delay_s": launch.signal_s,
        "array_parallelism": (getattr(job.asked, "at_once", None) or len(job.elements)) if job.elements else None,
        "use_srun": False, "stderr_to_stdout": True, "setup": _setup(config, job), "teardown": _teardown(config, job)}
    additional = {
        "chdir": str(Path.cwd()), "kill-on-invalid-dep": "yes" if job.dependencies else None,
        "output": f"{literal(config.folder.absolute() / FOLDER)}/{log}",
        # The limits of the shell that submits are the login node's (CPU seconds, locked memory). Jobs get their node's.
        "propagate": "NONE", "requeue" if launch.requeue else "no-requeue": True, **extra}
    return {**{name: value for name, value in named.items() if value not in (None, "")}, "wckey": None,
            "additional_parameters": {name: value for name, value in sorted(additional.items()) if value is not None}}


def _setup(config: Config, job: Job) -> list[str]:
    """Lines of the job's script before the runner."""
    path = ":".join(shlex.quote(folder) for folder in (job.code, *plugin_folders()))
    return [*preamble(config.launch),
            f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1",
            # On scancel the shell waits for the runner to clean up.
            "trap stopped=yes TERM INT; trap : USR1 USR2"]


def _teardown(config: Config, job: Job) -> list[str]:
    """Lines of the job's script after the runner: if something killed it, the job is queued again."""
    killed = (f"{outer_python(config.launch, job.contained)} -m drover.launch.job "
              f"{shlex.quote(str(spec_path(config, job)))}")
    this = "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
    again = (f"[ $status != 137 ] || [ ${{stopped:-}} ] || {{ {killed}; "
             f"for pause in 1 5 20 60 0; do scontrol requeue {this} && break; sleep $pause; done; }}")
    return ["status=$?", *[again] * config.launch.requeue, "exit $status"]


def option_problems(launch: LaunchConfig, jobs: list[Job]) -> Iterator[str]:
    """Options that `extra` must not contain, for all stages and for each, and those that contradict the job."""
    own = {f"launch.{stage}.extra": launch.of(stage).extra or {} for stage in STAGES}
    for where, extra in {"launch.extra": launch.extra, **own}.items():
        for name, value in long_options(extra).items():
            if not str(value).isprintable():
                yield (f"{where}.{name} holds a line end or a control character, which an #SBATCH line cannot hold. "
                       f"Leave it out.")
            if len(name) == 1:
                yield f"{where} has {name}; write the long name of sbatch's option -{name} (man sbatch)."
            elif where == "launch.extra" and name in OPTIONS:
                yield f"{where} has {name}. Set launch.{name}; for a single stage, set it in launch.<stage>.extra."
            elif name in DECIDED or name.startswith("container"):
                setting = DECIDED.get(name, "launch.container")
                way = f"Use {setting}." if setting else "Leave it out."
                yield f"{where} has {name}, which the launcher sets itself. {way}"
    for word in launch.srun_args:
        name = word.lstrip("-").partition("=")[0]
        if re.match(r"-[A-Za-z]", word):
            yield f"launch.srun_args has {word}; write the long name of srun's option {word[:2]} (man srun)."
        elif name in DECIDED or name in SRUN or name.startswith("container"):
            yield f"launch.srun_args has {word}, which the launcher or launch.container sets. Leave it out."
    yield from container_problems(launch)
    for name, place in {"run folder": jobs[0].run if jobs else "", "working directory": str(Path.cwd())}.items():
        if found := re.search(r"\\|%[jtAa]" if name == "run folder" else r"\\", place):
            yield (f"The {name} {place} has {found[0]} in its path, which Slurm reads as something else. Use another "
                   f"folder{' (runs_dir, name)' * (name == 'run folder')}.")
    for job in jobs:
        asked = gpus_asked(job)
        ways = [*([f"{asked[0]} in launch.extra"] if asked else []), *["launch.gpu_type"] * bool(launch.gpu_type),
                *["launch.request_gpus=false"] * (not launch.request_gpus)]
        if job.gpus_per_node and len(ways) > 1:
            yield f"{job.key}: {' and '.join(ways)} decide what GPUs the job requests. Leave one out."
        if asked and asked[1] != job.gpus_per_node:
            yield (f"{job.key}: launch.extra requests {asked[1]:g} GPUs a node ({asked[0]}), but the job has "
                   f"{job.gpus_per_node} (launch.gpus_per_node), one for each rank. Make them equal.")


def container_problems(launch: LaunchConfig) -> Iterator[str]:
    """What cannot work in the settings of the container and of the test of nodes."""
    container = launch.container
    if container.image is None and (container.mounts or container.options):
        yield "launch.container has mounts or options, but no image. Set launch.container.image."
    if container.image is not None and launch.python is None:
        yield ("launch.container.image is set, but launch.python is not, and the Python that submits is not in the "
               "image. Set launch.python to one in the image, such as python3.")
    if container.image is not None and set(",:") & set(str(Path.cwd())):
        yield (f"The working directory {Path.cwd()} has a comma or a colon, so no container can mount it. Submit from "
               f"another folder.")
    if launch.health_check and not launch.preflight:
        yield ("launch.health_check is part of the preflight, but launch.preflight=false turns that off. Remove one of "
               "them.")


def _is_gpu(resource: str) -> bool:
    """Whether an item of `gres` requests GPUs: `gpu:h100:8`, `gres/gpu:8`."""
    return resource.removeprefix("gres/").split(":")[0] == "gpu"
