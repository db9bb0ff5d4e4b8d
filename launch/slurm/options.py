"""What a job requests: the parameters of submitit's executor, the setting that decides each option of sbatch, and those
that a user may add in `launch.extra`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drover.launch.plan import OPTIONS, Job
from drover.launch.slurm.chain import mark
from drover.launch.slurm.scheduler import literal
from drover.pipeline.config.kinds import plugin_folders
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.stages import STAGES, WATCH

FOLDER = Path("launch") / "submitit"
"""Submitit's folder in the run: scripts, pickles, results, and the logs of the jobs themselves."""
RESERVED = frozenset((
    "array", "chdir", "clusters", "cpus-per-gpu", "cpus-per-task", "distribution", "error", "exclude", "export",
    "export-file", "job-name", "kill-on-bad-exit", "kill-on-invalid-dep", "label", "mem", "no-requeue", "nodes",
    "ntasks", "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "overlap", "parsable", "partition", "requeue",
    "signal", "test-only", "time", "wait", "wrap"))
"""Options of sbatch and srun that the launcher sets, or that must not be set."""
GPUS = ("gpus", "gpus-per-node", "gpus-per-task")
"""Options that request GPUs and nothing else. `gres` can do that too."""
GPU_RESOURCE = re.compile(r"(?:^|,)(?:gres/)?gpu(?![^:,])[^,]*")
"""A GPU in the value of `gres`: `gpu:h100:8`, `gres/gpu:8`."""



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


def options_of(job: Job) -> dict[str, str | bool]:
    """The options that the user adds to a job, under sbatch's long names: True for one without a value (`exclusive:
    true`); those that are false are left out. Jobs without ranks need no GPUs: options that request them are left out.
    """
    options: dict[str, str | bool] = {
        key.lstrip("-").replace("_", "-"): value is True or str(value)
        for key, value in (job.resources.extra or {}).items() if value is not False}
    if not job.ranks:
        options["gres"] = GPU_RESOURCE.sub("", str(options.get("gres", ""))).lstrip(",")
        options = {name: value for name, value in options.items() if value != "" and name not in GPUS}
    return options


def parameters(config: Config, job: Job, ids: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of submitit's SlurmExecutor for a job (docs/slurm.md has the table). Those without a value are
    left out, except `wckey`: submitit would set one.

    ids: of the jobs that it depends on, by their stages.
    """
    launch, resources, extra = config.launch, job.resources, options_of(job)
    folder = config.folder.absolute() / FOLDER
    waits = [f"{'after' if job.stage == WATCH else 'afterok'}:{':'.join(ids[need] for need in job.dependencies)}"
             ] if job.dependencies else []  # they have begun, or have ended well
    waits += ["singleton"] if job.stage == "train" else []  # two jobs of one run never train at once
    waits += [str(extra.pop("dependency"))] if "dependency" in extra else []
    # Singleton goes by the name of the job alone: a run of this name in another folder must not be waited for.
    own = f"-{mark(config.folder)}" if job.stage == "train" else ""
    own_gpus = any(name in extra for name in GPUS) or GPU_RESOURCE.search(str(extra.get("gres", "")))
    by_count = job.gpus_per_node and launch.request_gpus and not own_gpus
    log = "%A_%a_0_log.out" if job.elements else "%j_0_log.out"
    path = ":".join(shlex.quote(folder) for folder in (job.code, *plugin_folders()))
    # The runner starts the ranks itself, by srun, again and again in one job: submitit starts it without srun.
    named = {
        "job_name": job.name + own, "time": job.minutes, "nodes": job.all_nodes,
        "ntasks_per_node": job.tasks_per_node, "cpus_per_task": job.cpus_per_task,
        "gpus_per_node": f"{launch.gpu_type or ''}:{job.gpus_per_node}".lstrip(":") if by_count else None,
        "mem": resources.mem, "partition": resources.partition, "dependency": ",".join(waits),
        **{name: extra.pop(name, None) for name in (*OPTIONS, "exclude")},
        "comment": f"drover:{mark(config.folder)}:{job.stage} {extra.pop('comment', '')}".rstrip(),
        "signal_delay_s": launch.signal_s,
        "array_parallelism": (getattr(resources, "at_once", None) or len(job.elements)) if job.elements else None,
        "use_srun": False, "stderr_to_stdout": True,
        "setup": [
            *setup_lines(launch),  # `environment` overrides it, as in the ranks
            *(f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()),
            f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1",
            # On scancel the shell waits for the runner to clean up.
            "trap stopped=yes TERM INT; trap : USR1 USR2"],
        "teardown": _teardown(config, job)}
    additional = {
        "chdir": str(Path.cwd()), "kill-on-invalid-dep": "yes" if job.dependencies else None,
        "output": f"{literal(folder)}/{log}",
        # The limits of the shell that submits are the login node's (CPU seconds, locked memory). Jobs get their node's.
        "propagate": "NONE", "requeue" if launch.requeue else "no-requeue": True, **extra}
    return {**{name: value for name, value in named.items() if value not in (None, "")}, "wckey": None,
            "additional_parameters": {name: value for name, value in sorted(additional.items()) if value is not None}}


def _teardown(config: Config, job: Job) -> list[str]:
    """Lines of the job's script after the runner: if something killed it, the job is queued again."""
    killed = (f"{outer_python(config.launch, job.contained)} -m drover.launch.job.task "
              f"{shlex.join([job.run, job.stage, job.chain])}")
    this = "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
    again = (f"[ $status != 137 ] || [ ${{stopped:-}} ] || {{ {killed}; "
             f"for pause in 1 5 20 60 0; do scontrol requeue {this} && break; sleep $pause; done; }}")
    return ["status=$?", *[again] * config.launch.requeue, "exit $status"]


def option_problems(launch: LaunchConfig) -> Iterator[str]:
    """Options that must not be given, and what else would make a job run in another way than it was planned."""
    given: dict[str, Mapping[str, object]] = {
        "launch.extra": launch.extra,
        "launch.srun_args": {word.partition("=")[0]: word for word in launch.srun_args},
        **{f"launch.{stage}.extra": launch.of(stage).extra or {} for stage in STAGES}}
    for where, options in given.items():
        for name, value in options.items():
            long = name.lstrip("-").replace("_", "-")
            if long in RESERVED or long.startswith("container"):
                yield (f"{where} has {name}, which the launcher sets itself. Remove it, and use the setting that "
                       f"decides it (`drover explain launch`).")
            elif re.match("-[A-Za-z]", name):
                yield f"{where} has {name}. Write the option's long name."
            if not f"{name}{value}".isprintable():  # in the script, what follows a line end would be a command
                yield f"{where} has {name!r} with a line end or a control character. Remove that."
    if launch.container.image is not None and launch.python is None:
        yield ("launch.container.image is set, but launch.python is not, and the Python that submits is not in the "
               "image. Set launch.python to one in the image, such as python3.")
    if launch.health_check and not launch.preflight:
        yield ("launch.health_check is part of the preflight, but launch.preflight=false turns that off. Remove one of "
               "them.")
