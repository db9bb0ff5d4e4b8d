"""A model with its tokenizer, of a run, a checkpoint or a Hugging Face folder; the ids of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.records.checkpoints import CHECKPOINTS
from drover.pipeline.records.weight_files import stated_settings

if TYPE_CHECKING:
    import torch

    from drover.model.config import ModelConfig
    from drover.model.llama import Llama
    from drover.pipeline.contract.run import Run
    from drover.pipeline.evaluation.placing import Placed
    from drover.pipeline.formats.interface import Weights
    from drover.pipeline.tokenization.tokenizer import Tokenizer

END_OF_TURN = "<|eot_id|>"
"""The end of a turn of a conversation in Llama 3's tokenizers."""


@dataclass(frozen=True)
class OpenedModel:
    """A model and its tokenizer, for measuring and generating text.

    Attributes:
        placed: the model on its device.
        tokenizer: its tokenizer; the model knows all its ids.
        path: the folder of the weights; for a run, that of its newest complete checkpoint.
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

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer in Hugging Face's form: next to the weights, or in the run's tokenizer stage."""
        run = run_of(self.path)
        return self.path if run is None else run.stage_folder("tokenizer") / "hf"


@contextmanager
def named_if_nan(opened: OpenedModel) -> Iterator[None]:
    """UserError in place of the FloatingPointError of a model that gives no numbers."""
    try:
        yield
    except FloatingPointError as error:
        raise UserError(f"No text can be written with {opened.path}: {error}. Its weights hold NaN or infinite "
                        f"numbers, or are too large for the precision. Try float32 (--dtype, evaluate.dtype), or an "
                        f"earlier checkpoint.") from error


def open_model(path: Path, device: torch.device, dtype: torch.dtype, *, tokenizer: Tokenizer | None = None,
               **where: Any) -> OpenedModel:
    """The model in a run's folder, in a training checkpoint inside of a run, or in a Hugging Face folder.

    Args:
        tokenizer: None: for a run and its checkpoints, that of its tokenizer stage, which `reuse` may take from another
            run; for a Hugging Face folder, its tokenizer.json.
        where: the ranks that hold it, and other arguments of `placing.place`.

    Raises:
        UserError: weights or tokenizer are missing or damaged, or do not belong together.
    """
    from drover.pipeline.evaluation.placing import place
    from drover.pipeline.formats.weights import open_weights

    with open_weights(path) as weights:
        tokenizer = tokenizer or tokenizer_of(path, weights)
        vocabulary = weights.config.vocab_size or 0
        if vocabulary < tokenizer.used:
            raise UserError(f"The model in {weights.path} knows {vocabulary} ids, but its tokenizer has "
                            f"{tokenizer.used}. They do not belong together: use the tokenizer that the model was "
                            f"trained with.")
        return OpenedModel(place(weights, device, dtype, **where), tokenizer, weights.path)


def run_of(path: Path) -> Run | None:
    """The run in a folder, or the run of a checkpoint's folder; otherwise None."""
    from drover.pipeline.contract.run import run_in

    for place in (path.absolute(), path.resolve()):
        inside = place.parent.name == CHECKPOINTS and len(place.parents) > 2
        for folder in (place, *([place.parents[2]] if inside else [])):
            if (folder / "config.yaml").is_file():
                return run_in(folder)
    return None


def tokenizer_of(path: Path, weights: Weights) -> Tokenizer:
    """The tokenizer of a model that `path` names; UserError if there is none."""
    from drover.pipeline.tokenization.conversion import open_tokenizer
    from drover.pipeline.tokenization.tokenizer import load_tokenizer

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


def prompt_ids(opened: OpenedModel, text: str) -> list[int]:
    """The ids of a prompt: BOS, as before every document in training, and the text's ids."""
    return [opened.tokenizer.bos_id, *opened.tokenizer.encode(text)]


def readable_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The UTF-8 bytes of an id: b"" for special ids, and for ids beyond the tokenizer's, which published models have
    because they round up their vocabulary."""
    return lambda token: tokenizer.token_bytes(token) if token < tokenizer.size else b""


def eos_ids(opened: OpenedModel) -> frozenset[int]:
    """EOS, and further ids that end a text by the model's generation_config.json, or without them there by its
    config.json. UserError for a file that cannot be read."""
    stated = stated_settings(opened.path).get("eos_token_id")
    tokens = stated if isinstance(stated, list) else [stated]
    return frozenset(token for token in (opened.tokenizer.eos_id, *tokens) if isinstance(token, int))


def ending_ids(opened: OpenedModel) -> frozenset[int]:
    """`eos_ids`, and the end of a turn if the tokenizer has one."""
    turn = opened.tokenizer.special_tokens.get(END_OF_TURN)
    return eos_ids(opened) | ({turn} if turn is not None else set())


def hugging_face_tokenizer(folder: Path) -> Any:
    """The tokenizer of transformers in a folder. UserError if it needs Python code of its own."""
    from transformers import AutoTokenizer

    try:
        # Earlier exports encode names of special tokens in a text as plain text; a template needs the tokens.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False,
                                             split_special_tokens=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(f"The tokenizer in {folder} needs its own Python code, which Drover does not run. Use the "
                        f"model where no tokenizer of transformers is needed.") from None
