"""The name `drover` among lm-evaluation-harness's models: importing this module registers it.

    python -m drover.tools.lm_eval --model drover --model_args run=runs/demo --tasks python_line \\
        --include_path configs/tasks

The harness (0.4) knows its own models and those registered in the same process; it reads no entry points. So
`drover.tools.lm_eval` imports this module and then starts the harness's command line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.registry import register_model

from drover.pipeline.config.evaluation import EvaluateConfig
from drover.pipeline.core.command_line import find_model
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.harness import HarnessModel
from drover.pipeline.evaluation.open_model import deliverable, open_model, run_of
from drover.pipeline.evaluation.prompts import eos_ids
from drover.pipeline.parallel.ranks import ALONE, start_ranks
from drover.pipeline.records.checkpoints import CHECKPOINTS, checkpoint_name

if TYPE_CHECKING:
    from drover.pipeline.contract.run import Run

NEWEST = "newest"
DTYPES = ("float32", "bfloat16")


@register_model("drover")
class DroverModel(HarnessModel):
    """A Drover model, or a Llama in Hugging Face format, for the harness.

    Under torchrun each rank holds the whole model if it fits, else a shard, and the ranks share each list of requests.

    Args:
        run: name or folder of a run, whose export by the stage convert is measured, as in the stage evaluate; before
            that exists, its newest checkpoint. Or a training checkpoint's folder, or a Hugging Face folder.
        checkpoint: of the run: a step, or `newest`.
        dtype: of weights and arithmetic, float32 or bfloat16; default: the run's evaluate.dtype, else float32.
        batch: sequences per forward pass; default: --batch_size if above 1, the run's evaluate.batch, 16.
        max_length: tokens per window; default: the run's evaluate.sequence_length, else the model's context.
        device: cpu, cuda, cuda:1 ...; by default, or without a GPU, the available one. With several ranks each uses its
            own.
        batch_size, max_batch_size: the harness's own options; `auto` means the default.

    Raises:
        UserError: an argument is wrong, or names something that does not exist.
    """

    def __init__(self, run: str | None = None, checkpoint: str | int | None = None, dtype: str | None = None,
                 batch: int | None = None, max_length: int | None = None, device: str | None = None,
                 batch_size: str | int | None = None, max_batch_size: int | None = None, **unknown: Any) -> None:
        if run is None or unknown:
            raise UserError(f"--model drover takes --model_args run=FOLDER[,checkpoint=STEP|{NEWEST}][,dtype=...]"
                            f"[,batch=...][,max_length=...]"
                            f"{', and not ' + ', '.join(unknown) if unknown else '; run= is missing'}.")
        path = find_model(str(run))
        of_run = run_of(path) if (path / "config.yaml").is_file() else None
        settings = EvaluateConfig() if of_run is None else of_run.config.evaluate
        if (chosen := dtype or settings.dtype) not in DTYPES:
            raise UserError(f"dtype={chosen} is not supported: use {' or '.join(DTYPES)}.")
        weights = _weights(of_run, path, checkpoint)
        ranks = start_ranks() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ALONE
        if ranks.world > 1:
            where = ranks.device
        elif not torch.cuda.is_available() and (device is None or device.startswith("cuda")):
            where = torch.device("cpu")  # cuda:0 is the default of the harness's command line
        else:
            where = torch.device(device or "cuda")
        opened = open_model(weights, where, getattr(torch, chosen), ranks=ranks)
        given = int(str(batch_size)) if str(batch_size).isdigit() else 1
        super().__init__(opened.placed, opened.tokenizer, ranks=ranks, length=max_length or settings.sequence_length,
                         batch=batch or (given if given > 1 else settings.batch), ends=eos_ids(opened))
        self.path = opened.path


def _weights(run: Run | None, path: Path, checkpoint: str | int | None) -> Path:
    """The folder of the requested weights."""
    if checkpoint is None:
        return deliverable(path)
    if run is None:
        raise UserError(f"checkpoint={checkpoint} needs run= to be the folder of a run; {path} is not one.")
    if checkpoint == NEWEST:
        return run.folder
    try:
        found = run.stage_folder("train") / CHECKPOINTS / checkpoint_name(int(checkpoint))
    except ValueError:
        raise UserError(f"checkpoint={checkpoint} is neither a step nor {NEWEST!r}.") from None
    if not found.is_dir():
        raise UserError(f"The run {run.folder} has no checkpoint after step {checkpoint} ({found}).")
    return found
