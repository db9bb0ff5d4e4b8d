"""What to do about a step whose loss or gradient norm is NaN, or far above those of the steps before.

Before a step the guards set limits. The engine updates the weights, on the device and on all ranks alike, only if
neither number is above its limit (NaN fails this comparison by itself). After the step the guards judge the two numbers
by the same comparison, so both agree. The decision is a pure function of the numbers seen, and the state goes into the
checkpoint with every float exact: a resumed run decides as one that was never interrupted.

A spike is a value above `median + spike_deviations x deviation` of the last `spike_window` updates. The window holds
applied updates only: no number that is not finite, and none of a skipped update. So under `log` a lasting higher level
becomes normal once it fills half the window. Under `skip` it does not; the run cannot skip for ever either, since
`max_skipped` skipped updates in a row stop it with an explanation.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from drover.pipeline.config.training import GuardConfig
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.exclusion import Range, format_ranges
from drover.pipeline.data.provenance import documents_of, named
from drover.pipeline.data.sampling.loader import TrainingData
from drover.pipeline.records.checkpoints import TrainingProgress
from drover.pipeline.records.metrics import DIVERGED, Rollback, add_rollback, excluded_by, read_rollbacks

if TYPE_CHECKING:
    from drover.pipeline.parallel.ranks import Ranks
    from drover.pipeline.training.engine import StepResult

PHASED = " (with train.phases: end the phase at this step by `until`, and add one with a lower `lr`)"

UNLIMITED = float(np.finfo(np.float32).max)
"""The largest float32, not float64: as a float32 on the device the latter is infinity, which infinity would pass."""
NORMAL = 1.4826
"""Standard deviations in a median absolute deviation of normal noise."""
LOSS_FLOOR, NORM_FLOOR = 0.01, 0.05
"""The deviation is at least this share of the median, so that small changes of a flat curve are no spikes. With 8
deviations a loss must rise by 8%, a gradient norm by 40%."""


@dataclass(frozen=True)
class StepLimits:
    """An update is applied only if they allow it. Both are exact in float32, so that the comparison is the same there
    and in float64."""

    loss: float = UNLIMITED
    grad_norm: float = UNLIMITED

    def allow(self, loss: Any, grad_norm: Any) -> Any:
        """Whether both are within the limits, which NaN is not: a boolean of numbers, or a tensor of tensors."""
        return (loss <= self.loss) & (grad_norm <= self.grad_norm)


@dataclass(frozen=True)
class GuardDecision:
    """The decision on a step. event: skip, spike or rollback; None if the step is normal. text: a sentence with the
    numbers, for a person; empty if the step is normal."""

    step: int
    samples: tuple[Range, ...]
    loss: float
    grad_norm: float
    event: Literal["skip", "spike", "rollback"] | None = None
    text: str = ""

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        return self.event in (None, "spike")

    @property
    def finite(self) -> bool:
        """Whether loss and norm are finite."""
        return bool(StepLimits().allow(self.loss, self.grad_norm))

    @property
    def skipped(self) -> str | None:
        """Why the update was skipped: `nonfinite` or `spike`; None if it was not."""
        return ("spike" if self.finite else "nonfinite") if self.event == "skip" else None


class Guards:
    """The judge of every step. All ranks hold one, give it the same numbers, and so decide alike.

    Args:
        config: train.guards.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.go_on({}, 0)

    def go_on(self, state: dict[str, Any], rollbacks: int) -> None:
        """Continue from a state that `state` returned, or from {}.

        rollbacks: how many the run has made. A checkpoint's state does not count them: it was saved before.
        """
        self.rollbacks_total = rollbacks
        window = max(self.config.spike_window, self.config.spike_min_history)
        self._losses = deque[float](state.get("losses", ()), window)
        self._norms = deque[float](state.get("grad_norms", ()), window)
        self.skipped_total = int(state.get("skipped_total", 0))
        self.spikes_total = int(state.get("spikes_total", 0))
        self.consecutive_skipped = int(state.get("consecutive_skipped", 0))

    def describe(self, samples: Sequence[Range]) -> str:
        """The documents in ranges of samples. Called only when training must stop."""
        return ""

    def state(self) -> dict[str, Any]:
        """The state as JSON. A `Guards` that is given it judges exactly as this one would."""
        return {"losses": list(self._losses), "grad_norms": list(self._norms), "skipped_total": self.skipped_total,
                "spikes_total": self.spikes_total, "consecutive_skipped": self.consecutive_skipped}

    def forget(self) -> None:
        """Clear the history: another mixture, length or batch has another loss and norm."""
        self._losses.clear()
        self._norms.clear()

    def counters(self) -> dict[str, int]:
        """For the manifest: updates skipped for either reason, spikes logged or skipped, rollbacks."""
        return {"skipped": self.skipped_total, "spikes": self.spikes_total, "rollbacks": self.rollbacks_total}

    def limits(self) -> StepLimits:
        """The limits above which the next update must not be applied."""
        return StepLimits() if self.config.spike == "log" else self._spike_limits()

    def judge(self, step: int, loss: float, grad_norm: float, samples: Sequence[Range],
              can_roll_back: bool = True) -> GuardDecision:
        """Judge the step that was made under `limits()`.

        Args:
            step: its number, counted from 1.
            loss, grad_norm: global, the same on every rank.
            samples: ranges of the samples in its batch.
            can_roll_back: whether there is a checkpoint to go back to. Without one, a spike is skipped.

        Raises:
            UserError: too many updates in a row were skipped, or there were too many rollbacks.
        """
        decision = GuardDecision(step, tuple((int(first), int(end)) for first, end in samples), loss, grad_norm)
        limits = self._spike_limits()
        if decision.finite and limits.allow(loss, grad_norm):
            self._note(loss, grad_norm)
            return decision
        if not decision.finite:
            return self._skip(decision, f"step {step}: loss {loss:.6g}, gradient norm {grad_norm:.6g}, not both finite")
        text = f"step {step}: {' and '.join(self._excesses(loss, grad_norm, limits))}"
        if self.config.spike == "rollback" and can_roll_back:
            return self._roll_back(decision, text)
        self.spikes_total += 1
        if self.config.spike == "log":
            self._note(loss, grad_norm)
            return replace(decision, event="spike", text=text)
        if self.config.spike == "rollback":
            text += ", and there is no checkpoint yet to go back to"
        return self._skip(decision, text)

    def _note(self, loss: float, grad_norm: float) -> None:
        self.consecutive_skipped = 0
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def _skip(self, decision: GuardDecision, text: str) -> GuardDecision:
        self.skipped_total += 1
        self.consecutive_skipped += 1
        if self.consecutive_skipped <= self.config.max_skipped:
            return replace(decision, event="skip", text=text)
        fix = ("To accept a higher level as normal, set train.guards.spike=log. To continue past bad data, raise "
               "train.guards.max_skipped." if decision.finite else
               "Look at the text (drover trace RUN --step N --text). If it is clean, lower train.lr or lengthen "
               f"train.warmup_steps, and continue with --accept-changes{PHASED}, or start again with --force.")
        raise UserError(
            f"{DIVERGED} {decision.step}: {self.consecutive_skipped} updates in a row were skipped, and "
            f"train.guards.max_skipped is {self.config.max_skipped}. The last was {text}; "
            f"{self._where(decision.samples)}. The weights are those from before the first of these steps, and the "
            f"checkpoints are valid. {fix}")

    def _roll_back(self, decision: GuardDecision, text: str) -> GuardDecision:
        if self.rollbacks_total >= self.config.max_rollbacks:
            raise UserError(
                f"{DIVERGED} {decision.step}: another rollback is needed, and train.guards.max_rollbacks "
                f"is {self.config.max_rollbacks}. The reason was {text}; {self._where(decision.samples)}. This "
                f"update was not applied, and the checkpoints are valid. Look at the text (drover trace RUN --step N "
                f"--text). Lower train.lr and continue with --accept-changes{PHASED}, or set train.guards.spike=log to "
                f"accept such steps as normal.")
        self.rollbacks_total += 1
        return replace(decision, event="rollback", text=text)

    def _where(self, samples: Sequence[Range]) -> str:
        documents = self.describe(samples)
        of_documents = f", of the documents {documents}" if documents else ""
        return f"it was to train on samples {format_ranges(samples)}{of_documents}"

    def _spike_limits(self) -> StepLimits:
        if len(self._losses) < self.config.spike_min_history:
            return StepLimits()
        return StepLimits(self._limit(self._losses, LOSS_FLOOR), self._limit(self._norms, NORM_FLOOR))

    def _limit(self, values: Sequence[float], floor: float) -> float:
        median = statistics.median(values)
        deviation = max(NORMAL * statistics.median(abs(value - median) for value in values), floor * abs(median))
        return min(UNLIMITED, float(np.float32(median + self.config.spike_deviations * deviation)))

    def _excesses(self, loss: float, grad_norm: float, limits: StepLimits) -> list[str]:
        return [f"{name} {value:.4g} is a spike against a median of {statistics.median(history):.4g} over the last "
                f"{len(history)} updates (limit {limit:.4g})"
                for name, value, limit, history in (("the loss", loss, limits.loss, self._losses),
                                                    ("the gradient norm", grad_norm, limits.grad_norm, self._norms))
                if value > limit]


def json_number(value: float) -> float | str:
    """A number as JSON: NaN and infinities, which JSON lacks, become the text `nan`, `inf`, `-inf`."""
    return value if np.isfinite(value) else str(float(value))


Log = Callable[..., None]
"""(event, **details): to events.jsonl, from rank 0."""


class GuardRunner(Guards):
    """The guards of one start of training. Every method is called on all ranks alike.

    Attributes:
        batch_sequences: sequences per global batch.
        excluded: the samples that rollbacks have excluded.
        rollbacks: all rollbacks of the run.
    """

    def __init__(self, work: Work, ranks: Ranks, data: TrainingData, say: Say) -> None:
        super().__init__(work.config.train.guards)
        self.folder = work.folder
        self.ranks = ranks
        self.data = data
        self.say = say
        self.batch_sequences = 0
        self._read()

    def _read(self) -> None:
        self.rollbacks = self.ranks.by_leader(lambda: read_rollbacks(self.folder))
        self.excluded = excluded_by(self.rollbacks, self.data.order.links)
        self.data.leave_out(self.excluded)

    def judge_step(self, step: int, result: StepResult, progress: TrainingProgress, can_roll_back: bool,
                   log: Log) -> GuardDecision:
        """Judge step number `step`. Print and log anything unusual, with the documents of the batch."""
        samples = self.excluded.take(progress.samples, self.batch_sequences).ranges
        decision = self.judge(step, result.loss, result.grad_norm, samples, can_roll_back)
        assert result.applied == decision.applied, "the device and the guards decided differently"
        if decision.event and self.ranks.is_rank_zero:  # only rank 0 prints and logs, so only it reads the documents
            documents = documents_of(self.data, decision.samples)
            meaning = {"skip": "the update was skipped", "rollback": "going back to the last checkpoint",
                       "spike": "logged only"}[decision.event]
            self.say(f"{decision.text}; {meaning}. Documents: {named(documents)}")
            log(decision.event, step=step, samples=[list(part) for part in decision.samples],
                loss=json_number(result.loss), grad_norm=json_number(result.grad_norm), text=decision.text,
                documents=[vars(document) for document in documents])
        return decision

    def describe(self, samples: Sequence[Range]) -> str:
        """See Guards. Rank 0 reads them while the others wait: if they exited first, rank 0 would be ended before it
        reports."""
        return str(self.ranks.same(named(documents_of(self.data, samples)) if self.ranks.is_rank_zero else None))

    def exclude(self, decision: GuardDecision, back_to: int) -> None:
        """Exclude the samples of a step from training permanently. The record is on disk before anything is loaded."""
        if self.ranks.is_rank_zero:
            plan = self.data.order.plan_at(decision.samples[-1][1])
            add_rollback(self.folder, Rollback(decision.step, back_to, decision.samples, plan, decision.text))
        self._read()

    def step_fields(self, decision: GuardDecision, before: int, after: int) -> dict[str, object]:
        """Fields of a step's line in metrics.jsonl about skipped updates and excluded samples; empty if there are
        none."""
        fields = {"skipped": decision.skipped, "rollbacks": len(self.rollbacks),
                  "left_out": [list(part) for part in self.excluded.within(before, after)]}
        return {name: value for name, value in fields.items() if value}
