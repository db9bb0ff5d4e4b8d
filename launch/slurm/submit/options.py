"""More options of sbatch, as `launch.extra` has them: what is said there counts, once, over what Drover asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.launching import LaunchConfig
from pipeline.contract.stages import STAGES

SHORT = {"A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "J": "job-name", "L": "licenses", "N": "nodes",
         "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "m": "distribution",
         "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time",
         "w": "nodelist", "x": "exclude"}
"""Long names of sbatch's options."""
NEEDED = {"array": "launch.<stage>.array", "cpus-per-task": "launch.cpus", "job-name": "name",
          "no-requeue": "launch.requeue: false", "nodes": "launch.train.nodes",
          "ntasks": "launch.gpus_per_node or launch.processes",
          "ntasks-per-node": "launch.gpus_per_node or launch.processes", "requeue": "launch.requeue",
          "signal": "launch.signal_s", **dict.fromkeys(("chdir", "error", "kill-on-invalid-dep", "open-mode", "output",
                                                        "parsable", "wrap"), "")}
"""Options that the jobs rely on, and the setting that decides each; empty where none does."""
ALIKE = {"gpus_per_node": ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"),
         "mem": ("mem", "mem-per-cpu", "mem-per-gpu")}
"""Options that ask for the same thing as one of ours, under whatever name."""


def long_options(extra: Mapping[str, str | int | bool]) -> dict[str, str | bool]:
    """Options by their long names: True for one without a value (`exclusive: true`); those that are false are left
    out."""
    found: dict[str, str | bool] = {}
    for key, value in extra.items():
        name = key.lstrip("-").replace("_", "-")
        if value is not False:
            found[SHORT.get(name, name)] = value if value is True else str(value)
    return found


def lay_over(parameters: Mapping[str, Any], extra: Mapping[str, str | bool]) -> dict[str, Any]:
    """submitit's parameters without those that `extra` (by long names) asks for otherwise."""
    return {name: value for name, value in parameters.items() if not _is_said(name, extra)}


def option_problems(launch: LaunchConfig) -> list[str]:
    """What `extra` must not decide, for all stages and for each."""
    found = []
    for where, extra in _extras(launch):
        for name in long_options(extra):
            if name in NEEDED:
                way = f"Say it with {NEEDED[name]}." if NEEDED[name] else "Leave it out."
                found.append(f"{where} holds {name}, which the jobs rely on as the launcher sets it. {way}")
    return found


def _is_said(parameter: str, extra: Mapping[str, str | bool]) -> bool:
    if parameter == "gpus_per_node" and any(part.split(":")[0].rpartition("/")[2] == "gpu"
                                            for part in str(extra.get("gres", "")).split(",")):
        return True
    return any(name in extra for name in ALIKE.get(parameter, (parameter.replace("_", "-"),)))


def _extras(launch: LaunchConfig) -> Iterator[tuple[str, Mapping[str, str | int | bool]]]:
    yield "launch.extra", launch.extra
    for stage in STAGES:
        if own := launch.of(stage).extra:
            yield f"launch.{stage}.extra", own
