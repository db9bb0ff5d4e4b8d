"""Looking at the model while it trains: held-out loss, sample texts, and the lines that tell of them.

A line goes to the log after its step's checkpoint, which holds it as well: looking at the model may fail (memory, a bad
prompt), and must not cost the steps since the last save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from pipeline.contract.stage_work import Work
from pipeline.data.sampling.batch import Batch
from pipeline.data.shard_table import Opener, ShardTable
from pipeline.parallel.grid import Grid
from pipeline.records.checkpoints import TrainingProgress
from pipeline.records.metrics import read_metrics
from pipeline.training.engines.engine import Engine
from pipeline.training.engines.fp8_watch import Fp8Watch, summary
from pipeline.training.engines.norms import layer_norms, measured
from pipeline.training.recorder import Recorder
from pipeline.training.sampling_attempts import MOST_ENDED, SamplingAttempts
from pipeline.training.validation import Samples, Validation
from pipeline.training.watchdog import Watchdog


class Monitor:
    """What one attempt at training shows of its model. Every method is called on all ranks alike.

    precision: of the arithmetic, of which fp8 is looked at. table: the encode stage's shards. opener: what reads them,
    where they are not files.
    """

    def __init__(self, work: Work, grid: Grid, engine: Engine, recorder: Recorder, watchdog: Watchdog,
                 say: Callable[[str], None], precision: str, table: ShardTable, opener: Opener | None = None) -> None:
        self.work, self.ranks, self.engine, self.recorder = work, grid.ranks, engine, recorder
        self.watchdog, self.say = watchdog, say
        self.validation, self.samples = Validation(work, grid, table, opener), Samples(work, grid)
        self.attempts = SamplingAttempts(work.folder, grid.ranks)
        self.fp8 = Fp8Watch(engine, grid.ranks.device) if precision == "fp8" else None
        self._fp8_seen = self._norms_seen = False

    def due(self, step: int, every: int) -> bool:
        """Whether something done every so many steps is due after step number `step`; always after the last."""
        return step % every == 0 or step == self.work.config.train.steps

    def validate(self, step: int) -> dict[str, float] | None:
        """Held-out bits per byte of each source, where that is due after `step`; NaN is said and left out."""
        if not self.due(step, self.work.config.train.heldout_every):
            return None
        with self.recorder.looking():
            found = self.validation.measure(self.engine, partial(self.watchdog.pulse, first=self.validation.first))
        finite = {source: bits for source, bits in found.items() if math.isfinite(bits)}
        if missing := [source for source in found if source not in finite]:
            self.say(f"after step {step} the loss on held-out text of {', '.join(missing)} is NaN")
        return finite

    @contextmanager
    def norms(self, step: int) -> Iterator[dict[str, dict[str, float | str]]]:
        """Measure norms in the step within, if `train.norms_every` wants it: by layer they are there afterwards, and of
        every parameter in events.jsonl. In the first step of a start too, as with fp8."""
        every, found = self.work.config.train.norms_every, dict[str, dict[str, float | str]]()
        if every is None or (self._norms_seen and not self.due(step, every)):
            yield found
            return
        self._norms_seen = True
        with measured(self.engine, self.ranks.device) as norms:
            yield found
        self.recorder.event("norms", step=step, parameters=norms)
        found |= layer_norms(norms)

    def watch_fp8(self, step: int, batch: Batch, targets: int) -> dict[str, float | str]:
        """What fp8 does to the values of the layers, as curves, where that is due after `step`; layer by layer it goes
        into events.jsonl. In the first step of a start too: what it needs of memory shows at once.

        batch, targets: of the step, see `Fp8Watch.measure`.
        """
        if self.fp8 is None or (self._fp8_seen and not self.due(step, self.work.config.train.fp8_watch_every)):
            return {}
        self._fp8_seen = True
        self.watchdog.pulse()
        with self.recorder.looking():
            layers = self.fp8.measure(batch, targets)
        self.recorder.event("fp8", step=step, layers=layers)
        return summary(layers)

    def log(self, progress: TrainingProgress, heldout: dict[str, float] | None,
            fp8: dict[str, float | str] | None = None) -> None:
        """The line of the last step, where that is due, with what was found by looking at the model after it."""
        due = (heldout is not None or bool(fp8) or "weight_norms" in (progress.record or {})
               or self.due(progress.step, self.work.config.train.log_every))
        if due and self.recorder.log is not None:
            found = {} if heldout is None else {"heldout_bpb": heldout}
            self.recorder.log.step({**(progress.record or {}), **found, **(fp8 or {})})

    def draw_samples(self, step: int) -> None:
        """Draw texts where that is due after `step`, unless it ended earlier starts: it would for ever, since the
        checkpoint is there."""
        if not self.due(step, self.work.config.train.sample_every):
            return
        if (ended := self.attempts.ended(step)) >= MOST_ENDED:
            self.say(f"no sample texts after step {step}: {ended} starts of training ended while drawing them")
            self.recorder.event("samples_left_out", step=step, ended=ended)
            return
        self.attempts.begin(step, ended)
        try:
            with self.recorder.looking():
                texts = self.samples.draw(self.engine, self.watchdog.pulse)
            for prompt, text in texts:
                if self.recorder.log is not None:
                    self.recorder.log.sample(step, prompt, text)
        except FloatingPointError as error:  # the guards deal with it: the next loss is NaN too
            self.say(f"no sample texts after step {step}: {error}")
        self.attempts.end()

    def catch_up(self, progress: TrainingProgress) -> None:
        """After a kill between a checkpoint and its step's line in the log: look, and write that line, now."""
        if progress.record is None:
            return
        logged = None
        if self.ranks.leads:
            metrics = read_metrics(self.work.folder / "metrics.jsonl")
            logged = bool(metrics) and metrics[-1]["step"] >= progress.step
        if not self.ranks.same(logged):
            self.log(progress, self.validate(progress.step))
            self.draw_samples(progress.step)
