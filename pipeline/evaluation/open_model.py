"""A model with its tokenizer, from whatever a user points at: a run, a checkpoint of one, a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.records.checkpoints import CHECKPOINTS

if TYPE_CHECKING:
    import torch

    from drover.model.config import ModelConfig
    from drover.model.llama import Llama
    from drover.pipeline.contract.run import Run
    from drover.pipeline.evaluation.placing import Placed
    from drover.pipeline.formats.base import Weights
    from drover.pipeline.tokenization.base import Tokenizer


@dataclass(frozen=True)
class OpenedModel:
    """What text is measured with and made by.

    Attributes:
        placed: the model on its device.
        tokenizer: its tokenizer; the model knows all its ids.
        path: the folder that the weights lie in: of a run, that of its newest complete checkpoint.
    """

    placed: Placed
    tokenizer: Tokenizer
    path: Path

    @property
    def model(self) -> Llama:
        """The model itself."""
        return self.placed.model

    @property
    def config(self) -> ModelConfig:
        """The network's shape, `vocab_size` known."""
        return self.model.config


def open_model(path: Path, device: torch.device, dtype: torch.dtype, *, tokenizer: Tokenizer | None = None,
               **where: Any) -> OpenedModel:
    """The model in a run's folder, in a training checkpoint inside of a run, or in a Hugging Face folder.

    Args:
        tokenizer: None: of a run and of its checkpoints that of its tokenizer stage, which `reuse` may have taken from
            another run; of a Hugging Face folder its tokenizer.json.
        where: the ranks that have it, and what else `placing.place` takes.

    Raises:
        UserError: there are no weights or no tokenizer there, or they are damaged or do not belong together.
    """
    from drover.pipeline.evaluation.placing import place
    from drover.pipeline.formats.weights import open_weights

    with open_weights(path) as weights:
        tokenizer, vocabulary = tokenizer or _tokenizer(path, weights), weights.config.vocab_size or 0
        if vocabulary < tokenizer.used:
            raise UserError(f"The model in {weights.path} knows {vocabulary} ids, but its tokenizer has "
                            f"{tokenizer.used}. They do not belong together: give the model the tokenizer that it was "
                            f"trained with.")
        return OpenedModel(place(weights, device, dtype, **where), tokenizer, weights.path)


def run_of(path: Path) -> Run | None:
    """The run in a folder, or the one that a checkpoint's folder lies in; None of anything else."""
    from drover.pipeline.contract.run import run_in

    for place in (path.absolute(), path.resolve()):
        inside = place.parent.name == CHECKPOINTS and len(place.parents) > 2
        for folder in (place, *([place.parents[2]] if inside else [])):
            if (folder / "config.yaml").is_file():
                return run_in(folder)
    return None


def deliverable(path: Path) -> Path:
    """Of a run's folder what its stage convert exported, which is what its stage evaluate measures; before that is
    done, and of any other folder, `path`, of which `open_model` takes a run's newest checkpoint."""
    run = run_of(path) if (path / "config.yaml").is_file() else None
    return run.stage_folder("convert") / "hf" if run is not None and run.manifest("convert") is not None else path


def _tokenizer(path: Path, weights: Weights) -> Tokenizer:
    from drover.pipeline.tokenization.kinds import load_tokenizer, open_tokenizer

    if weights.form == "hf":
        file = weights.path / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{weights.path} has weights but no tokenizer.json. Put the model's there, with its "
                            f"tokenizer_config.json (transformers' AutoTokenizer.save_pretrained writes both).")
        return open_tokenizer("huggingface", file)
    run = run_of(path)
    if run is None:
        raise UserError(f"{path} is a checkpoint outside of a run, so its tokenizer is not known. Give the run's "
                        f"folder, the checkpoint's folder inside of it, or a Hugging Face folder made by the stage "
                        f"convert.")
    run.finished("tokenizer")
    return load_tokenizer(run.stage_folder("tokenizer"))
