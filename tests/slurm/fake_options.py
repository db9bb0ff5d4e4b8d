"""The options of sbatch and srun that the fake Slurm knows; it refuses any other, as Slurm does with a wrong one."""

from __future__ import annotations

import getopt
import os
import shlex

from tests.slurm.fake_state import SlurmError

SHARED = {
    "account": "A", "chdir": "D", "comment": "", "constraint": "C", "cpus-per-task": "c", "error": "e", "exclude": "x",
    "export": "", "gpus-per-node": "", "gpus-per-task": "", "gres": "", "hint": "", "input": "i", "job-name": "J",
    "mem": "", "mem-per-cpu": "", "nodelist": "w", "nodes": "N", "ntasks": "n", "ntasks-per-node": "", "open-mode": "",
    "output": "o", "partition": "p", "qos": "q", "reservation": "", "signal": "", "threads-per-core": "", "time": "t",
    "cpu-bind": "", "distribution": "m", "dependency": "d", "mail-type": "", "mail-user": "", "wckey": ""}
VALUES = {
    "sbatch": {**SHARED, "array": "a", "begin": "b", "kill-on-invalid-dep": "", "wrap": "", "wait-all-nodes": ""},
    "srun": {**SHARED, "mpi": "", "relative": "r", "wait": "W", "jobid": ""}}
FLAGS = {
    "sbatch": {"hold": "H", "no-requeue": "", "parsable": "", "requeue": "", "quiet": "Q", "overcommit": "O",
               "verbose": "v"},
    "srun": {"label": "l", "overlap": "", "exact": "", "unbuffered": "u", "quiet": "Q", "no-kill": "k",
             "overcommit": "O", "verbose": "v"}}
OPTIONAL = {"sbatch": {"exclusive": ("", "exclusive"), "no-kill": ("k", "on")},
            "srun": {"kill-on-bad-exit": ("K", "1"), "exclusive": ("", "exclusive")}}


def parse(program: str, arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options by their long names, flags as "yes", and what follows them.

    Raises:
        SlurmError: an option that the fake does not know.
    """
    values, flags, optional = VALUES[program], FLAGS[program], OPTIONAL[program]
    bare = {f"--{name}": default for name, (_, default) in optional.items()}
    bare |= {f"-{short}": default for short, default in optional.values() if short}
    shorts = {f"-{short}": f"--{name}" for name, (short, _) in optional.items() if short}
    spelled = [f"{shorts.get(word, word)}={bare[word]}" if word in bare else word for word in arguments]
    letters = "".join(short + ":" for short in values.values()) + "".join(flags.values())
    try:
        found, rest = getopt.getopt(spelled, letters.replace("::", ":").lstrip(":"), [
            *(f"{name}=" for name in (*values, *optional)), *flags])
    except getopt.GetoptError as error:
        raise SlurmError(f"unrecognized option '{error.opt}' ({error})", 255) from None
    names = {f"-{short}": name for name, short in (*values.items(), *flags.items()) if short}
    return {(name := names.get(key) or key.lstrip("-")): "yes" if name in flags else value
            for key, value in found}, rest


def script_options(text: str) -> list[str]:
    """The words of a script's #SBATCH lines, which end where its commands begin."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return words


def exported(choice: str) -> dict[str, str]:
    """The environment that `--export` lets through."""
    words = [word for word in choice.split(",") if word]
    kept = dict(os.environ) if not words or "ALL" in words else {
        name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "FAKE_SLURM"))
        or name == "PATH"}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            kept[name] = value
        elif name in os.environ:
            kept[name] = os.environ[name]
    return kept
