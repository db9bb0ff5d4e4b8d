"""What is refused before anything starts or queues: everything that would fail later and can be known now."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from launch.forecast import Disk, readable, state_bytes_per_rank
from launch.plan import Job, Options
from pipeline.config.checks import problems, rank_problems
from pipeline.config.launching import minutes
from pipeline.config.tree import Config
from pipeline.errors import UserError, listed
from pipeline.run import Run, State
from pipeline.stages import STAGES, before

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$|API_?KEY|PRIVATE", re.IGNORECASE)
_ASSIGNED = re.compile(r"\b(\w+)=[\"']?[^\s\"'$]")
_KNOWN = re.compile(r"\b(?:hf_|sk-|ghp_|glpat-)[A-Za-z0-9_-]{12,}")


def configuration_problems(config: Config, jobs: list[Job], path: str) -> None:
    """Refuse what cannot work, all at once: the configuration itself, and its fit to the planned ranks."""
    found = problems(config)
    for job in jobs:
        if job.key == "train" and job.to_run:
            found += rank_problems(config, job.ranks)
            if config.parallel.engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
                found.append("parallel.engine is 'deepspeed', but the package deepspeed is not installed here; install "
                             "it, or take parallel.engine=fsdp2.")
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise UserError(f"{count} in the configuration {path}:\n{listed(found)}")


def refuse_unsound(run: Run, jobs: list[Job], options: Options, *, showing: bool = False) -> None:
    """Refuse, before anything starts, what a stage would refuse later: absent inputs and stale stages.

    Where jobs are only shown, inputs may still be absent.
    """
    asked = list(dict.fromkeys(job.stage for job in jobs))
    running = list(dict.fromkeys(job.stage for job in jobs if job.to_run))
    if not showing and (absent := _absent(run, running, asked)):
        wanted = [stage for stage in STAGES if stage in asked or stage in absent]
        raise UserError(f"{', '.join(running)} cannot start: {', '.join(absent)} of {run.folder} "
                        f"{'is' if len(absent) == 1 else 'are'} not done, and not asked for. Ask for "
                        f"{'it' if len(absent) == 1 else 'them'} too (--stage {','.join(wanted)}, or --stage all), "
                        f"or take finished stages from another run with reuse=<folder>.")
    _refuse_absent_files(run.config, jobs)
    for job in jobs:
        refuse_stale(run, job, options)
    for stage in before(asked):
        if stage not in asked and (changed := run.changed_settings(stage)):
            refusal, wanted = run.refusal(stage, State("stale", changed)), [stage, *asked]
            raise UserError(f"{refusal}\n{stage} was not asked for, but what was asked for is made of it: name it as "
                            f"well (--stage {','.join(name for name in STAGES if name in wanted)}).")


def refuse_stale(run: Run, job: Job, options: Options) -> None:
    """Refuse a stage that was made of something else, unless the request says what to do about it."""
    if job.forced or job.state.kind != "stale":
        return
    mixed = job.state.begun_only and job.stage != "train"  # two settings must not meet in one stage's outputs
    if options.accept_drift and not run.is_reused(job.stage) and not mixed:
        return
    refusal = run.refusal(job.stage, job.state)
    if options.accept_drift and mixed:
        raise UserError(f"{refusal}\n--accept-drift does not help here: {job.stage} was only begun, and outputs of "
                        f"two settings must not be mixed in one stage.")
    later = [stage for stage in STAGES if stage == job.stage or job.stage in before([stage])]
    raise UserError(f"{refusal}\n--force rebuilds every stage that is asked for; --stage {','.join(later)} --force "
                    f"rebuilds {job.stage} and what is made of it.") if len(later) > 1 else refusal


def cluster_problems(config: Config, jobs: list[Job], disk: Disk | None, environment: Mapping[str, str]) -> None:
    """Refuse what the cluster would refuse or break on later, all at once.

    disk: None where jobs are only shown: this may be another machine than the one that submits.
    environment: of the shell that submits.
    """
    launch, site = config.launch, config.launch.limits
    found = [f"launch.secrets names {name}, but your shell has no such variable. Set it, or take it out."
             for name in launch.secrets if not environment.get(name)]
    found += [f"launch.environment holds {name}, which looks like a secret: it would be written to files. Put its name "
              f"into launch.secrets and its value into your shell." for name in launch.environment
              if _SECRET.search(name)]
    found += [f"launch.{name} holds what looks like a secret: it would be written to files. Put the name of the "
              f"variable into launch.secrets and its value into your shell." for name in ("setup", "wrap", "extra")
              if _holds_secret(str(getattr(launch, name)))]
    longest = None if site.time is None else minutes(site.time)
    for job in (job for job in jobs if job.to_run):
        if site.nodes is not None and job.nodes > site.nodes:
            found.append(f"{job.key} asks for {job.nodes} nodes; the site gives a job {site.nodes} (launch.limits).")
        if longest is not None and job.asked.minutes > longest:
            found.append(f"{job.key} asks for {job.asked.minutes} min; the site gives a job {longest} (launch.limits): "
                         f"training goes on by itself after a time limit, so ask for less (launch.{job.stage}.time).")
        if site.array is not None and job.elements and max(job.elements) >= site.array:
            found.append(f"{job.key} has {job.parts} elements; the site allows {site.array} (launch.limits): set "
                         f"launch.{job.stage}.array.")
        if job.stage == "train" and job.asked.minutes * 60 <= 2 * launch.signal_s:
            found.append(f"launch.train.time is {job.asked.minutes} min, but the warning comes {launch.signal_s} s "
                         f"before its end (launch.signal_s): nothing would be left to train in.")
    count = sum(len(job.elements) or 1 for job in jobs if job.to_run)
    if site.jobs is not None and count > site.jobs:
        found.append(f"{count} jobs would be queued; the site allows {site.jobs} (launch.limits).")
    train = next((job for job in jobs if job.key == "train" and job.to_run), None)
    state = state_bytes_per_rank(config, train.ranks) if train else None
    if state is not None and site.gpu_memory_gb is not None and state > site.gpu_memory_gb * 1e9:
        found.append(f"weights, gradients and moments alone take {readable(state)} a rank, but a GPU here has "
                     f"{site.gpu_memory_gb:g} GB (launch.limits): take more nodes, a smaller parallel.dp_replicate, or "
                     f"parallel.engine=deepspeed with offload.")
    if disk is not None and disk.needed > disk.free:
        parts = ", ".join(f"{name} {readable(size)}" for name, size in disk.parts.items() if size)
        found.append(f"the run may write {readable(disk.needed)} ({parts}), but {readable(disk.free)} are free where "
                     f"{config.folder} goes: free some, set runs_dir, or keep fewer checkpoints "
                     f"(train.checkpoint.keep).")
    if found:
        raise UserError(f"This cannot be submitted:\n{listed(found)}" if len(found) > 1 else found[0])


def _holds_secret(text: str) -> bool:
    """Whether a command gives a value to a variable with the name of a secret, or has a token in its known form."""
    return bool(_KNOWN.search(text)) or any(_SECRET.search(name) for name in _ASSIGNED.findall(text))


def refuse_wrong_packages() -> None:
    """Refuse packages of other versions than Drover asks for, or absent ones: jobs would fail hours later.

    Raises:
        UserError: naming all of them, and the command that mends it.
    """
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in metadata.requires("drover") or []]
    except metadata.PackageNotFoundError:
        return  # not installed but run from a checkout; what is missing shows at import
    found = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} is {version}, but {requirement.specifier} is needed")
    if found:
        raise UserError(f"The Python environment does not fit:\n{listed(found)}\n"
                        f"`pip install --editable .` in the checkout mends it.")


def _refuse_absent_files(config: Config, jobs: list[Job]) -> None:
    """A corpus or tokenizer file that is not there is found before the stages ahead of it have run."""
    found = []
    for stage in dict.fromkeys(job.stage for job in jobs if job.to_run):
        try:
            found += [f"{stage}: the input file {path} is not there." for _, path in
                      STAGES[stage].input_files(config) if not Path(path).is_file()]
        except UserError as error:
            found.append(f"{stage}: {error}")
    if found:
        raise UserError(f"What the stages read is not there:\n{listed(found)}" if len(found) > 1 else found[0])


def _absent(run: Run, running: list[str], asked: list[str]) -> list[str]:
    needed = {need for stage in running for need in STAGES[stage].needs}
    return [stage for stage in STAGES if stage in needed and stage not in asked and run.manifest(stage) is None]
