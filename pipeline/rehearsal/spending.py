"""Use spare memory to save time: settings that lose less time and still fit, each of them rehearsed."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.config.batch import BatchPlan
from drover.pipeline.config.training import KEPT_ACTIVATIONS
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import NotRehearsedError, UserError
from drover.pipeline.rehearsal.fitting import TIGHT, Layout, Settings, named, possible, rehearsed
from drover.pipeline.rehearsal.lost_time import GAIN, before_exchanges

KEPT = (("attention",), ("wo",), ("wq", "wk", "wv"), ("w1", "w3"))
"""Groups of `train.kept_activations` that the search adds together."""


def spend(config: Config, ranks: int, memory: float, report: Say) -> list[Layout]:
    """The configuration's layout, then each layout that the search moved to.

    The search rehearses every single change (`changes`) that takes memory and may save waiting, recomputing or
    exchanging time. It moves to the change that saves most and fits; of equal ones, to the smallest. It ends when no
    change saves time.

    Args:
        memory: bytes of a GPU, of which the share TIGHT may be used.
        report: called with a line about every layout.

    Raises:
        UserError: the configuration cannot be rehearsed, or its schedule is zbv, whose bubble is not known.
    """
    if config.parallel.pp > 1 and config.parallel.pp_schedule == "zbv":
        raise UserError("With parallel.pp_schedule=zbv, --spend cannot search: the bubble of zbv is not known. Take "
                        "1f1b or interleaved.")

    def tried(settings: Settings) -> Iterator[Layout]:
        try:
            layout = rehearsed(config, settings, ranks)
        except (NotRehearsedError, UserError) as error:
            if not settings:
                raise  # the configuration itself cannot be rehearsed
            report(f"{named(settings)}: not rehearsed: {error}")
        else:
            report(str(layout))
            yield layout

    path = [*tried({})]
    while True:
        before = path[-1]
        enough = before.lost.time - GAIN
        candidates = [{**before.settings, **change} for change in changes(changed(config, before.settings), ranks)]
        better = [layout for settings in candidates if possible(config, settings, ranks)
                  and before_exchanges(changed(config, settings), ranks).time < enough for layout in tried(settings)
                  if layout.peak <= TIGHT * memory and layout.lost.time < enough]
        if not better:
            return path
        path.append(min(better, key=lambda layout: (round(layout.lost.time / GAIN), layout.peak)))


def changes(config: Config, ranks: int) -> Iterator[Settings]:
    """Single changes that take memory and may save time."""
    train, parallel = config.train, config.parallel
    if train.activation_checkpointing == "full":
        for kept in (["attention"], [*KEPT_ACTIVATIONS]):
            yield {"train.activation_checkpointing": "selective", "train.recomputed_blocks": 1,
                   "train.kept_activations": kept}
    if train.activation_checkpointing == "selective":
        for group in KEPT:
            if more := [name for name in group if name not in train.kept_activations]:
                yield {"train.kept_activations": [*train.kept_activations, *more]}
    if train.activation_checkpointing != "none":
        yield {"train.activation_checkpointing": "none", "train.recomputed_blocks": 1}
        if 2 * train.recomputed_blocks <= config.model.layers:
            yield {"train.recomputed_blocks": 2 * train.recomputed_blocks}
    micro_batch = BatchPlan.of(train, parallel, ranks).micro_batch
    larger: Settings = {"train.micro_batch": 2 * micro_batch}
    if BatchPlan.of(changed(config, larger).train, parallel, ranks).micro_batch > micro_batch:
        yield larger
    if parallel.reshard == "always":
        yield {"parallel.reshard": "never"}
    if parallel.pp == 1 and parallel.reduce == "each":
        yield {"parallel.reduce": "last"}
    if parallel.dp_replicate > 0:
        yield {"parallel.dp_replicate": 2 * parallel.dp_replicate}
    if parallel.pp > 1 and parallel.pp_schedule == "interleaved":
        most = config.model.layers // parallel.pp
        for stages in sorted({parallel.pp_stages + 1, min(2 * parallel.pp_stages, most), most}):
            if parallel.pp_stages < stages <= most:
                yield {"parallel.pp_stages": stages}
