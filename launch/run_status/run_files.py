"""How far a run is by its own files: nothing is asked of Slurm here, nothing is written, nothing needs to be whole.

Files may be replaced, cut or absent while they are read: what cannot be read now counts as not there.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from launch.slurm.chain import Chain, ChainJob, read_chain
from launch.slurm.evaluations import owed
from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import NODES, excluded
from pipeline.config.phases import PhasePlan
from pipeline.config.training import TrainConfig
from pipeline.config.yaml_source import load_bounded
from pipeline.contract.manifest import MANIFEST, Manifest, read_manifest
from pipeline.contract.parts import UNITS
from pipeline.contract.run import reused_folder
from pipeline.contract.stages import STAGES
from pipeline.contract.start_record import STARTED
from pipeline.contract.state import STOP, StageState, read_attempts, read_state
from pipeline.errors import UserError
from pipeline.files import parsed_json, read_lines, typed
from pipeline.records.metrics import Event, Line
from pipeline.records.pending_evaluations import EVALUATIONS, evaluation_folder

TAIL_BYTES = 64 * 1024
RECENT = 50
"""Steps whose time is averaged."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Training:
    """The end of train's log. `rate_s`: seconds that a step takes now, with everything between the steps."""

    step: int
    steps: int | None
    rate_s: float | None
    loss: float | None
    tokens_per_s: float | None
    goodput: float | None


@dataclass(frozen=True)
class StageFiles:
    """What a stage's folder says.

    Attributes:
        manifest: of the finished stage; `damaged`: why it cannot be read.
        reused: the run that it is taken from.
        state: STATE.json.
        begun: whether there is a start record.
        alive: whether the process that last held the stage is there; None where that cannot be seen from here.
        touched: when it last wrote anything that is looked at here, in seconds since the epoch; 0 if never.
        units: finished units by phase. `expected`: how many there will be in the last phase, if known.
        parts: of arrays, the elements whose share is done, by phase. `of_parts`: elements in all, 0 if unknown.
        starts: how often each job has started the stage. ended: the launcher's last word on a start.
        first: when the first job of the submission that last worked on it began, in seconds since the epoch; 0 if no
            job did.
        log: the newest log, a file or a folder with a pair for each rank.
    """

    stage: str
    manifest: Manifest | None = None
    damaged: str = ""
    reused: Path | None = None
    state: StageState | None = None
    begun: bool = False
    alive: bool | None = False
    touched: float = 0.0
    units: dict[str, int] = field(default_factory=dict)
    expected: int | None = None
    parts: dict[str, frozenset[int]] = field(default_factory=dict)
    of_parts: int = 0
    training: Training | None = None
    starts: dict[str, int] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    first: float = 0.0
    log: Path | None = None


@dataclass(frozen=True)
class EvaluationFiles:
    """An evaluation of a checkpoint beside training. `result`: in words, of a finished one."""

    step: int
    done: bool = False
    result: str = ""
    failed: str = ""
    job: ChainJob | None = None


@dataclass(frozen=True)
class RunFiles:
    """A run folder as it was found. train_nodes: what its configuration asks for."""

    folder: Path
    chain: Chain | None
    stages: dict[str, StageFiles]
    evaluations: list[EvaluationFiles]
    strikes: list[dict[str, Any]]
    excluded: list[str]
    stop: str | None
    train_nodes: int = 1

    def jobs(self, stage: str) -> list[ChainJob]:
        """The jobs of a stage in the newest submission, without evaluations of checkpoints."""
        jobs = self.chain.jobs if self.chain else ()
        return [job for job in jobs if job.stage == stage and job.kind != "evaluation"]


def read_run(folder: Path) -> RunFiles:
    """Everything that the files of a run say, at this moment."""
    settings = _settings(folder)
    chain = _quietly(lambda: read_chain(folder), None)
    attempts = _objects(lambda: read_attempts(folder))
    nodes = _setting(settings, "launch", "train", "nodes")
    nodes = nodes if isinstance(nodes, int) else 1
    stages = {stage: _stage(folder, stage, settings, chain, attempts) for stage in [*STAGES, *_added(folder, chain)]}
    stop = _quietly(lambda: (folder / STOP).read_text(encoding="utf-8").strip(), None)
    strikes = _objects(lambda: read_lines(folder / NODES, appended=True))
    return RunFiles(folder, chain, stages, _evaluations(folder, settings, chain), strikes,
                    _quietly(lambda: excluded(folder, nodes), []), stop, nodes)


def when(text: str) -> float:
    """An ISO time in seconds since the epoch; 0 if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _added(folder: Path, chain: Chain | None) -> list[str]:
    """Stages that plugins added, by what they left here or were submitted as: nothing of theirs is imported."""
    begun = [path.parent.name for path in sorted(folder.glob(f"*/{STARTED}"))]
    asked = [job.stage for job in chain.jobs] if chain else []
    return [stage for stage in dict.fromkeys([*begun, *asked]) if stage not in STAGES]


def newest_log(folder: Path, stage: str) -> Path | None:
    """The stage's newest log in a run: the folder of its last job, or the local launcher's file."""
    latest, file = folder / "logs" / stage / "latest", folder / "logs" / f"{stage}.log"
    found = [(_written(path), path) for path in (latest, file) if path.exists()]
    newest = max(found)[1] if found else None
    # `latest` may point elsewhere a moment later.
    return newest.with_name(newest.resolve().name) if newest == latest else newest


def _stage(folder: Path, stage: str, settings: dict[str, Any], chain: Chain | None,
           attempts: list[dict[str, Any]]) -> StageFiles:
    own = folder / stage
    begun = (own / STARTED).exists()
    manifest, damaged = _manifest(own)
    reused = None
    if manifest is None and not damaged and not begun and stage in STAGES and STAGES[stage].reusable:
        reused = _origin(folder, settings, stage)
        manifest = _manifest(reused / stage)[0] if reused else None
    events = [event for event in attempts if event.get("stage") == stage]
    starts: dict[str, set[Any]] = {}
    for event in events:
        if event.get("event") == "attempt":
            starts.setdefault(str(event.get("job")), set()).add(event.get("start"))
    last = [when(str(event.get("at"))) for event in events if event.get("chain") == events[-1].get("chain")]
    parts, of_parts = _parts(own, chain, stage)
    phases = _folders(own / UNITS)
    inside = [path for phase in phases for path in _folders(phase)]
    units = {path.name: _count(path) for path in phases if path.name != "parts"}
    training = _training(own, settings) if stage == "train" else None
    ended = [event for event in events if event.get("event") == "ended"]
    logs = [own / name for name in ("metrics.jsonl", "STATE.json", STARTED)]
    return StageFiles(
        stage, manifest, damaged, reused, read_state(own), begun, _alive(folder, stage),
        max(map(_written, [*logs, *phases, *inside, folder / "logs" / f"{stage}.log"])), units,
        _text_shards(folder, settings) if stage == "encode" and manifest is None else None, parts, of_parts, training,
        {job: len(found) for job, found in starts.items()}, ended[-1] if ended else {},
        min(last, default=0.0), newest_log(folder, stage))


def _manifest(folder: Path) -> tuple[Manifest | None, str]:
    try:
        return read_manifest(folder), ""
    except UserError as error:
        return None, str(error)
    except (OSError, TypeError):
        return None, f"{folder / MANIFEST} cannot be read"


def _settings(folder: Path) -> dict[str, Any]:
    """The resolved configuration as it stands in the run folder, not checked: it may be of another version."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    file = folder / "config.yaml"
    found = _quietly(lambda: load_bounded(file.read_bytes(), loader, str(file)), None)
    return found if isinstance(found, dict) else {}


def _setting(settings: dict[str, Any], *keys: str) -> Any:
    value: Any = settings
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _origin(run_folder: Path, settings: dict[str, Any], stage: str) -> Path | None:
    """The run, of those named by `reuse:`, that holds the stage."""
    seen: set[Path] = set()
    reuse = settings.get("reuse")
    while isinstance(reuse, str) and (folder := reused_folder(run_folder, reuse)).resolve() not in seen:
        if (folder / stage / MANIFEST).is_file():
            return folder
        seen.add(folder.resolve())
        run_folder, reuse = folder, _settings(folder).get("reuse")
    return None


def _training(folder: Path, settings: dict[str, Any]) -> Training | None:
    records = _tail(folder / "metrics.jsonl", Line)
    if not records:
        return None
    last, times = records[-1], [record["step_s"] for record in records[-RECENT:] if "step_s" in record]
    rate = sum(times) / len(times) if times else None
    begun = [event for event in _tail(folder / "events.jsonl", Event) if event.get("event") in ("start", "resume")]
    if begun and (steps := last["step"] - begun[-1].get("step", 0)) >= 10:
        # As training itself reckons: also what lies between the steps, checkpoints and looks at held-out text.
        wall = _written(folder / "metrics.jsonl") - when(str(begun[-1].get("time")))
        rate = wall / steps if wall > 0 else rate
    rate = _quietly(lambda: _of_coming_steps(rate, settings, last["step"], begun), rate)
    share = last.get("goodput")
    share = share.get("share") if isinstance(share, dict) else share
    steps = _setting(settings, "train", "steps")
    return Training(last["step"], steps if isinstance(steps, int) else None, rate, _float(last.get("loss")),
                    _float(last.get("tokens_per_s")), _float(share))


def _of_coming_steps(rate: float | None, settings: dict[str, Any], step: int, begun: list[dict[str, Any]]
                     ) -> float | None:
    """Seconds that a step still to come takes, as `rate` is of those of this start: those of other phases may have more
    tokens."""
    given = settings.get("train", {})
    if rate is None or not given.get("phases"):
        return rate
    plan = PhasePlan.of(TrainConfig.model_validate(
        {key: given[key] for key in ("phases", "steps", "sequence_length", "batch_tokens", "micro_batch")}))
    first = begun[-1].get("step", 0) if begun else 0
    if not first < step < plan.steps:
        return rate
    done = (plan.tokens_at(step) - plan.tokens_at(first)) / (step - first)
    return rate * (plan.tokens - plan.tokens_at(step)) / (plan.steps - step) / done


def _parts(folder: Path, chain: Chain | None, stage: str) -> tuple[dict[str, frozenset[int]], int]:
    """Elements of the stage's arrays that are done, by phase, and how many each has."""
    phases: dict[str, set[int]] = {}
    total = 0
    for path in _files(folder / UNITS / "parts"):
        if match := re.fullmatch(r"(.+)\.(\d+)-of-(\d+)\.json", path.name):
            phases.setdefault(match[1], set()).add(int(match[2]))
            total = max(total, int(match[3]))
    for job in chain.jobs if chain else ():
        if job.stage == stage and job.kind == "array":
            spec = _quietly(partial(JobSpec.load, Path(job.spec)), None)
            total = (spec.parts if spec else 0) or max(total, (job.elements or (0,))[-1] + 1)
    return {phase: frozenset(done) for phase, done in phases.items()}, total


def _text_shards(folder: Path, settings: dict[str, Any]) -> int | None:
    """How many units encode will do: one for each text shard."""
    manifest = _manifest(folder / "shard")[0]
    if manifest is None and (origin := _origin(folder, settings, "shard")):
        manifest = _manifest(origin / "shard")[0]
    return sum(record["path"].endswith(".tar") for record in manifest.outputs) if manifest else None


def _evaluations(folder: Path, settings: dict[str, Any], chain: Chain | None) -> list[EvaluationFiles]:
    """Those that were made, begun or submitted, and those that are owed: every so many checkpoints that are there."""
    steps: dict[int, ChainJob | None] = {}
    every, between = (_setting(settings, *keys) for keys in (
        ("launch", "evaluate", "every_checkpoints"), ("train", "checkpoint", "every_steps")))
    if isinstance(every, int) and isinstance(between, int) and every * between > 0:
        last = _setting(settings, "train", "steps")
        due: list[int] = _quietly(lambda: owed(folder, every * between, last), [])
        steps.update(dict.fromkeys(due))
    steps.update({step: None for path in _folders(folder / EVALUATIONS) if (step := _step(path.name))})
    for job in chain.jobs if chain else ():
        if job.kind == "evaluation" and (step := _step(job.spec) or _step(job.name)):
            steps[step] = job
    return [_evaluation(evaluation_folder(folder, step), step, job) for step, job in sorted(steps.items())]


def _evaluation(folder: Path, step: int, job: ChainJob | None) -> EvaluationFiles:
    done = _manifest(folder / "evaluate")[0] is not None
    failed = [state.reason for stage in ("convert", "evaluate")
              if (state := read_state(folder / stage)) and state.status == "failed"]
    result = _quietly(lambda: _result(folder), "") if done else ""
    return EvaluationFiles(step, done, result, failed[0] if failed and not done else "", job)


def _result(folder: Path) -> str:
    results = _read(folder / "evaluate" / "results.json")
    words = []
    if (bits := _float(_setting(results, "heldout", "overall", "bits_per_byte"))) is not None:
        words.append(f"{bits:.3f} bits per byte")
    for name, task in (results.get("tasks") or {}).items():
        metrics = _setting(task, "metrics") or {}
        for metric in list(metrics)[:1]:
            if (value := _float(_setting(metrics, metric, "value"))) is not None:
                words.append(f"{name} {metric} {value:.3f}")
    return ", ".join(words)


def _alive(folder: Path, stage: str) -> bool | None:
    """Whether the process that wrote its name into the stage's lock still runs; the lock itself is not touched."""
    text = _quietly(lambda: (folder / ".locks" / stage).read_text(encoding="utf-8"), "")
    match = re.match(r"process (\d+) on (\S+?),? ", text)
    if not match:
        return False
    if match[2] != platform.node():
        return None
    command = _quietly(lambda: Path(f"/proc/{match[1]}/cmdline").read_bytes(), b"")
    return f"pipeline.{stage}".encode() in command or f"pipeline/{stage}.py".encode() in command


def _tail(path: Path, kind: Any) -> list[dict[str, Any]]:
    """The last whole lines of a JSON-lines file, as far as they are of a kind (`typed`)."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[1 if size > TAIL_BYTES else 0:-1]
    except OSError:
        return []
    return [record for line in lines if (record := _object(line, kind))]


def _objects(read: Callable[[], Iterable[Any]]) -> list[dict[str, Any]]:
    found: list[Any] = _quietly(lambda: list(read()), [])
    return [value for value in found if isinstance(value, dict)]


def _object(text: bytes, kind: Any = dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _quietly(lambda: typed(parsed_json(text), kind), {})
    return found


def _read(path: Path) -> dict[str, Any]:
    return _object(_quietly(path.read_bytes, b""))


def _quietly(read: Callable[[], Value], otherwise: Value) -> Value:
    """What cannot be read now counts as not there."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, UserError):
        return otherwise


def _folders(path: Path) -> list[Path]:
    return _quietly(lambda: sorted(entry for entry in path.iterdir() if entry.is_dir()), [])


def _files(path: Path) -> list[Path]:
    return _quietly(lambda: sorted(path.iterdir()), [])


def _count(folder: Path) -> int:
    """Finished units in a phase's folder and those in it."""
    names: list[str] = _quietly(lambda: [entry.name for entry in os.scandir(folder)], [])
    return sum(name.endswith(".json") for name in names) + sum(map(_count, _folders(folder)))


def _written(path: Path) -> float:
    return _quietly(lambda: path.stat().st_mtime, 0.0)


def _step(text: str) -> int:
    found = re.findall(r"step-?(\d+)", text)
    return int(found[-1]) if found else 0


def _float(value: Any) -> float | None:
    """A number, also one that stands in the log as text because JSON has none such (NaN)."""
    return _quietly(lambda: None if value is None or isinstance(value, (bool, dict, list)) else float(value), None)
