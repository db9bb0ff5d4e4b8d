"""Weights & Biases: offline files in the run folder, or its server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal
from uuid import uuid4

from pipeline.training.sinks.base import About, Sink, SinkSettings, checkpoint_curves, curves, kept_id


class WeightsAndBiases(SinkSettings):
    """Curves and sample texts in Weights & Biases.

    Every start of one training continues the same run, whose ID stands in train/wandb.json. W&B takes nothing for a
    step of its own counter that lies behind, so that counter is one of rows, which goes on over starts, and charts are
    drawn over the metric `step`: steps that are done again after a kill are further points at the same place, of which
    the later ones count. Offline, each start writes a folder of its own, `wandb/offline-run-<time>-<ID>`;
    `wandb sync runs/<name>/wandb/offline-run-*` uploads them, in order, into the one run.
    The key is W&B's own affair (WANDB_API_KEY, `wandb login`).
    """

    package = "wandb"
    extra = "wandb"

    project: str = "drover"
    """W&B's project."""
    entity: str | None = None
    """The user or team that the project belongs to; null: W&B's default of the key."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes to `wandb/` in the run folder and needs neither network nor key; `online` sends it too."""

    def open(self, about: About) -> Sink:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline means offline
        import wandb
        identity, _ = kept_id(about, "wandb", lambda: uuid4().hex[:12])
        # Neither the console nor the checkout's changes are copied: nobody asked for them, and they may hold anything.
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        run = wandb.init(project=self.project, entity=self.entity, mode=self.mode, id=identity, resume="allow",
                         name=about.name, dir=str(about.run_folder), config=dict(about.settings), settings=quiet,
                         reinit="create_new")
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return _Run(run, about.told)


class _Run:
    def __init__(self, run: Any, rows: int) -> None:
        self._run, self._rows, self._prompts, self._ended_well = run, rows, dict[str, int](), False

    def step(self, record: dict[str, Any]) -> None:
        self._log(record["step"], curves(record))

    def sample(self, step: int, prompt: str, text: str) -> None:
        number = self._prompts.setdefault(prompt, len(self._prompts) + 1)
        self._log(step, {f"samples/{number}": f"{prompt}{text}"})

    def event(self, kind: str, details: dict[str, Any]) -> None:
        self._ended_well |= kind in ("finish", "stop")
        if found := checkpoint_curves(kind, details):
            self._log(details["step"], found)

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._ended_well else 1)

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._rows += 1
        self._run.log({"step": step, **values}, step=self._rows, commit=True)
