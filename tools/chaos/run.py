"""The run that a soak disturbs: its text and settings, what a user does with it, and what can be seen of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from launch.slurm.chain import Chain, read_chain
from launch.slurm.nodes import NODES
from launch.slurm.scheduler import Scheduler
from pipeline.contract.manifest import Manifest, read_manifest
from pipeline.contract.stages import REPOSITORY, STAGES
from pipeline.contract.state import ATTEMPTS
from pipeline.files import append_line
from pipeline.records.checkpoints import complete_checkpoints
from tools.slurm_lab import Lab
from tools.slurm_processes import PROC, process_table

CORPUS_BYTES = 130_000
SEQUENCES = 16
"""Of a step: 1, 2 or 4 ranks with a micro-batch of 4 share them."""
STALL_S = 1800.0
"""Without a step, a submission or a fault for so long, the soak gives up."""
TAIL_BYTES = 1 << 14
SETTINGS: dict[str, Any] = {
    "name": "soak",
    "shard": {"shard_mb": 0.03, "heldout_share": 0.1},
    "tokenizer": {"vocab_size": 768, "train_mb": 1.0},
    "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "context_length": 128},
    "train": {"sequence_length": 64, "batch_tokens": SEQUENCES * 64, "micro_batch": 4, "lr": 0.003, "warmup_steps": 10,
              "precision": "fp64", "heldout_tokens": 2000, "sample_tokens": 8, "prompts": ["def "],
              "guards": {"hang_minutes": 0.3}},
    "convert": {"check_tokens": 64},
    "evaluate": {"heldout_tokens": 4000, "prompts": ["def "], "prompt_tokens": 8},
    "launch": {"processes": 1},
}


class Stuck(Exception):  # noqa: N818 - says that nothing goes on
    """The run does not go on by itself, and not by the user's command either."""


class SoakRun:
    """A tiny training on the cluster of `lab`, in `folder`. `nodes`: what the next submission asks for."""

    def __init__(self, folder: Path, lab: Lab, nodes: int) -> None:
        self.folder, self.lab, self.nodes = folder, lab, nodes
        self.config, self.run = folder / "soak.yaml", folder / "runs" / "soak"
        self.environment = {**os.environ, **lab.environment(), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
        self.scheduler = Scheduler(self.environment)
        self.began = self._moved = time.monotonic()
        self._trace: list[int] = []
        self.submissions = 0

    # ---- what a user does

    def write(self, **train: Any) -> None:
        """Write the text and the settings."""
        corpus, size = self.folder / "corpus", 0
        corpus.mkdir(exist_ok=True)
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if size < CORPUS_BYTES and len(text) < 9_000:
                (corpus / f"{path.stem}.txt").write_text(text, encoding="utf-8")
                size += len(text)
        sources = [{"kind": "files", "name": "code", "paths": [f"{corpus}/*.txt"]}]
        self.config.write_text(yaml.safe_dump({
            **SETTINGS, "runs_dir": str(self.folder / "runs"), "reuse": str(self.folder / "runs/data"),
            "shard": {**SETTINGS["shard"], "sources": sources},
            "train": {**SETTINGS["train"], **train}}))

    def launcher(self, *arguments: str) -> str:
        """Call launch/submit.py in the folder; what it printed.

        Raises:
            Stuck: it refused.
        """
        answer = subprocess.run([sys.executable, str(REPOSITORY / "launch/submit.py"), *arguments], cwd=self.folder,
                                env=self.environment, stdin=subprocess.DEVNULL, text=True, capture_output=True)
        if answer.returncode:
            raise Stuck(f"submit.py {' '.join(arguments)} ended with {answer.returncode}:\n"
                        f"{answer.stdout[-2000:]}{answer.stderr}")
        return answer.stdout

    def local(self, stages: str, *overrides: str) -> None:
        """Do stages on this machine, without Slurm."""
        self.launcher("--config", self.config.name, "--stage", stages, "--cluster", "local", *overrides)

    def submit(self) -> None:
        """The user's own command, which also goes on with what was begun.

        Nodes that failed are taken for mended: it was the soak that made them fail.
        """
        (self.run / NODES).unlink(missing_ok=True)
        self.launcher("--config", self.config.name, "--stage", "all", "--cluster", "lab", "--nodes", str(self.nodes))
        self.submissions += 1
        self.log("submitted", nodes=self.nodes)

    def stop(self) -> None:
        """`submit.py --stop`, and wait until training has left the queue."""
        self.launcher("--stop", str(self.run))
        self.wait(lambda: not self.queued(), "the end of training that was asked to stop")

    # ---- what can be seen

    @property
    def chain(self) -> Chain | None:
        """The newest submission."""
        return read_chain(self.run)

    def job(self) -> str:
        """Id of the newest train job."""
        return [job.id for job in self.chain.jobs if job.stage == "train"][-1] if self.chain else ""

    def queued(self) -> bool:
        """Whether anything of the chain is in the queue, or may be: Slurm does not answer."""
        found = self.scheduler.jobs([job.id for job in self.chain.jobs]) if self.chain else {}
        return found is None or any(job.queued for job in found.values())

    def manifest(self, stage: str) -> Manifest | None:
        """Of a finished stage."""
        return read_manifest(self.run / stage)

    def step(self) -> int:
        """The step that was logged last; 0 before the first."""
        with suppress(OSError, ValueError), open(self.run / "train/metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            whole = file.read().split(b"\n")[:-1]
            return int(json.loads(whole[-1])["step"]) if whole else 0
        return 0

    def saved(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return complete_checkpoints(self.run / "train")

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that run, by rank."""
        return {int(rank): pid for pid, words in self._processes("pipeline.train")
                if (rank := words.get("RANK")) is not None}

    def runner(self) -> int | None:
        """Process id of the runner of the train job."""
        return next((pid for pid, _ in self._processes("launch.slurm.job.runner", "-train.json")), None)

    def _processes(self, *words: str) -> Iterator[tuple[int, dict[str, str]]]:
        """Processes of this run's jobs with all the words in their command line, and their environments."""
        for pid in process_table():
            try:
                command = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
                variables = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended, or is another user's
                continue
            if str(self.run) in command and all(word in command for word in words) and "srun\0" not in command:
                yield pid, dict(word.partition("=")[::2] for word in variables)

    # ---- waiting

    def wait(self, condition: Callable[[], Any], what: str, limit_s: float = STALL_S) -> None:
        """Wait for a condition.

        Raises:
            Stuck: in vain.
        """
        until = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until:
                raise Stuck(f"waited {limit_s:.0f} s in vain for {what}\n{self.story()}")
            time.sleep(0.2)

    def wait_for_steps(self) -> bool:
        """Wait until all ranks run and do steps, with the user's command where nothing is queued any more; False once
        training is done."""
        seen = self.step()
        while self.manifest("train") is None:
            if self.step() != seen and len(self.ranks()) == self.nodes:
                return True
            self.go_on()
            time.sleep(0.2)
        return False

    def go_on(self) -> None:
        """Give the user's command again if the chain has ended.

        Raises:
            Stuck: the run has left no trace for long.
        """
        if (trace := self._traces()) != self._trace:
            self._trace, self._moved = trace, time.monotonic()
        if time.monotonic() - self._moved > STALL_S:
            raise Stuck(f"nothing has happened for {STALL_S:.0f} s\n{self.story()}")
        if not self.queued() and self.manifest("report") is None:
            self.submit()

    def _traces(self) -> list[int]:
        """What grows while anything goes on."""
        logs = [self.run / "train/metrics.jsonl", *(self.run / ATTEMPTS).glob("*.jsonl")]
        return [self.submissions, sum(self.manifest(stage) is not None for stage in STAGES),
                sum(path.stat().st_size for path in logs if path.exists())]

    def story(self) -> str:
        """What the queue, the nodes and the newest jobs say, for whoever looks into a soak that failed."""
        queue = subprocess.run(["squeue"], env=self.environment, text=True, capture_output=True)
        logs = sorted(self.run.glob("logs/slurm/*.log"), key=lambda path: path.stat().st_mtime)[-2:]
        texts = [f"==> {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        return "\n".join([f"{queue.stdout}{queue.stderr}{self.lab.node_states()}", *texts])

    # ---- the record

    def log(self, event: str, **details: Any) -> None:
        """A line of chaos.jsonl, and of the terminal."""
        seconds = time.monotonic() - self.began
        record = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "seconds": round(seconds, 1),
                  "event": event, "step": self.step(), **details}
        append_line(self.folder / "chaos.jsonl", record)
        words = ", ".join(f"{name} {value}" for name, value in details.items())
        print(f"{seconds:7.1f} s  step {record['step']:>5}  {event}: {words}", flush=True)
