"""Going on from a checkpoint: whether it may be, in which precision, and what is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from pipeline.errors import UserError
from pipeline.formats.sharded_tensors import CheckpointReader, read_index
from pipeline.parallel.ranks import Ranks
from pipeline.records.checkpoints import TrainingProgress, read_marker
from pipeline.training.engines.engine import Engine
from pipeline.training.precision import choose_precision


def continued(path: Path, progress: TrainingProgress, plan: str, drift: bool) -> TrainingProgress:
    """Where training stands that goes on from the checkpoint at `path`, which says `progress`.

    Args:
        plan: SHA-256 of the order that is asked for now.
        drift: whether it may be another order than the checkpoint's.

    Raises:
        UserError: it is, and may not.
    """
    if progress.plan_sha256 != plan and not drift:
        raise UserError(f"{path} was trained on other token shards, sequence length, mixture or seed than are "
                        f"asked for now (plan {progress.plan_sha256[:12]} -> {plan[:12]}). Use --accept-drift to "
                        f"go on with the new order, or --force to start again.")
    return dataclasses.replace(progress, restarts=progress.restarts + 1, plan_sha256=plan)


def changed_code(path: Path, code: dict[str, str]) -> str:
    """What to say if the checkpoint at `path` was made by other code than `code`, hashes by file; "" if it was not."""
    before = read_marker(path).get("code", {})
    changed = sorted(name for name in before.keys() | code.keys() if before.get(name) != code.get(name))
    if not before or not changed:
        return ""
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"warning: trained so far by other code than is here now ({', '.join(changed[:3])}{more})"


def load(path: Path, engine: Engine, ranks: Ranks, updates: int) -> None:
    """Weights, optimizer state and generators from a checkpoint that any engine on any number of ranks has written."""
    with CheckpointReader(path, index=ranks.by_leader(lambda: read_index(path))) as reader:
        engine.load(reader, updates)
        generators = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
        for device in {"cpu", ranks.device.type}:
            if (state := _generator(reader, device, ranks.rank)) is not None:
                generators[device](state)


def _generator(reader: CheckpointReader, device: str, rank: int) -> torch.Tensor | None:
    """The state of a rank's generator; None where another number of ranks was there, or another device."""
    table, names = f"random.{device}", reader.names("random.")
    if table in names and rank < reader.shape(table)[0]:
        return reader.read(table, (rank, 0), (1, reader.shape(table)[1]))[0]
    of_its_own = f"{table}.{rank}"  # as before there was a table
    return reader.read(of_its_own) if of_its_own in names else None


def agreed_precision(wanted: str, begun: str, ranks: Ranks) -> tuple[str, str]:
    """The precision of all ranks and why, `begun` being the one that the checkpoint was trained in, if there is one:
    `auto` must not change with the machine."""
    if wanted == "auto" and begun:
        return begun, f"{begun}, as the run was begun"
    found = ranks.gather(choose_precision(wanted, ranks.device))
    chosen, why = found[0] if len({name for name, _ in found}) == 1 else ("fp32", "fp32: not every rank has fast bf16")
    return chosen, f"{why}, {begun} before" if begun not in ("", chosen) else why
