"""Loggers that may need a network: MLflow, and Weights & Biases."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Literal
from uuid import uuid4

from drover.pipeline.config.section import flatten
from drover.pipeline.training.sinks.base import About, CurveSink, Sink, SinkSettings, kept_id

AT_ONCE = 100
"""Parameters that MLflow takes in one call."""
LONGEST_TAG = 5000
"""Characters of a tag that MLflow takes."""
ENDINGS = {"finish": "FINISHED", "stop": "KILLED"}
"""MLflow's final status of a run by the event; any other end is FAILED."""


class MLflow(SinkSettings):
    """Curves, settings and the newest sample texts in MLflow.

    Every start of one training continues the same run; its ID is in train/mlflow.json. MLflow keeps every value of a
    step: a step that is repeated after a kill has several points with different times, of which the last counts. The
    newest sample text of each prompt is a tag (samples.jsonl has all texts). MLflow itself reads user and password of a
    server from the environment (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD).
    """

    needs = "mlflow"

    experiment: str = "drover"
    """MLflow's experiment. It is created if it does not exist."""
    tracking_uri: str | None = None
    """The tracking server, as http://host:5000; null: `mlflow/` in the run folder, without a network. To view that
    folder, install the full package mlflow, set MLFLOW_ALLOW_FILE_STORE=true and run `mlflow ui --backend-store-uri
    runs/<name>/mlflow`. Do not put a password here, since it would be written to files: use the environment."""

    def open(self, about: About) -> Sink:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # offline means offline
        uri = self.tracking_uri
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required from version 3.13 on
            uri = (about.run_folder.absolute() / "mlflow").as_uri()
        from mlflow import MlflowClient
        return _MLflowRun(MlflowClient(tracking_uri=uri), self.experiment, about)


class _MLflowRun(CurveSink):
    def __init__(self, client: Any, experiment: str, about: About) -> None:
        self._client = client
        self._prompts = dict[str, int]()

        def make() -> str:
            result = client.get_experiment_by_name(experiment)
            place = result.experiment_id if result else client.create_experiment(experiment)
            return str(client.create_run(place, run_name=about.name).info.run_id)
        self._id, new = kept_id(about, "mlflow", make)
        if not new:
            client.update_run(self._id, status="RUNNING")
            return
        from mlflow.entities import Param
        settings = [Param(name, str(value)[:LONGEST_TAG]) for name, value in flatten(dict(about.settings)).items()]
        for start in range(0, len(settings), AT_ONCE):
            client.log_batch(self._id, params=settings[start:start + AT_ONCE])

    def sample(self, step: int, prompt: str, text: str) -> None:
        number = self._prompts.setdefault(prompt, len(self._prompts) + 1)
        self._client.set_tag(self._id, f"sample {number}", f"after step {step}: {prompt}{text}"[:LONGEST_TAG])

    def close(self) -> None:
        self._client.set_terminated(self._id, status=ENDINGS.get(self.ended, "FAILED"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])


class WeightsAndBiases(SinkSettings):
    """Curves and sample texts in Weights & Biases.

    Every start of one training continues the same run; its ID is in train/wandb.json. W&B rejects values for an earlier
    step of its own counter. So that counter numbers rows, over all starts, and charts use the metric `step` as x axis:
    a step that is repeated after a kill has several points, of which the last counts. Offline, each start writes its
    own folder `wandb/offline-run-<time>-<ID>`. `wandb sync runs/<name>/wandb/offline-run-*` uploads them in order into
    the one run. W&B itself reads the key (WANDB_API_KEY, `wandb login`).
    """

    needs = "wandb"

    project: str = "drover"
    """W&B's project."""
    entity: str | None = None
    """The user or team that owns the project; null: the key's default in W&B."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes to `wandb/` in the run folder and needs neither network nor key; `online` also uploads."""

    def open(self, about: About) -> Sink:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline means offline
        import wandb
        identity, _ = kept_id(about, "wandb", lambda: uuid4().hex[:12])
        # Do not upload the console output or the checkout's changes: they may contain anything.
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        run = wandb.init(project=self.project, entity=self.entity, mode=self.mode, id=identity, resume="allow",
                         name=about.name, dir=str(about.run_folder), config=dict(about.settings), settings=quiet,
                         reinit="create_new")
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return _WandbRun(run, about.reported)


class _WandbRun(CurveSink):
    def __init__(self, run: Any, rows: int) -> None:
        self._run = run
        self._rows = rows
        self._prompts = dict[str, int]()

    def sample(self, step: int, prompt: str, text: str) -> None:
        number = self._prompts.setdefault(prompt, len(self._prompts) + 1)
        self.log({f"samples/{number}": f"{prompt}{text}"}, step)

    def close(self) -> None:
        self._run.finish(exit_code=0 if self.ended else 1)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._rows += 1
        self._run.log({"step": step, **values}, step=self._rows, commit=True)
