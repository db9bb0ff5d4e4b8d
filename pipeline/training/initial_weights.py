"""Training that starts from given weights (`train.init_from`) instead of random ones.

Each rank reads the part of every parameter that it holds. The optimizer, the schedule and the data start from scratch.
Two things may differ from the weights' own model: the rotary positions (theta, scaling, context), so that a context can
be extended, and the vocabulary may be larger. Its new rows start as in a new model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from drover.model.config import ModelConfig
from drover.pipeline.config.loading import POSITIONS
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.evaluation.open_model import run_of
from drover.pipeline.formats.interface import Weights
from drover.pipeline.formats.weights import open_weights
from drover.pipeline.parallel.fsdp import InitialValues
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.weight_files import weights_folder
from drover.pipeline.storage.model_hub import names_the_hub
from drover.pipeline.tokenization.conversion import open_tokenizer
from drover.pipeline.tokenization.files import MODEL_FILE, RECORD, kind_of_model, vocabulary_record

FREE = (*POSITIONS, "vocab_size")
"""The parts of a shape that may differ from the weights' own model. All others must be equal."""
TOKENIZER = "tokenizer.json"


@contextmanager
def given_values(work: Work, path: Path, model: ModelConfig, own: InitialValues, ranks: Ranks
                 ) -> Iterator[InitialValues]:
    """The values in the weights of `train.init_from`, valid while the context is open. Rows that they lack are `own`.

    Args:
        model: the shape that is trained, `vocab_size` known.

    Raises:
        UserError: the weights are missing or damaged, or have another shape or tokenizer; the same on every rank. NaN
            and infinite values raise it later, when the weights are read.
    """
    def checked() -> str:
        refuse_other_shape(path, model)
        return refuse_other_tokenizer(path, work.input("tokenizer")[0] / "hf")
    compared = ranks.by_leader(checked)
    with open_weights(path) as weights:
        if ranks.is_rank_zero:
            work.say(f"starts from the weights in {weights.path} ({weights.form}; {compared})"
                     + "".join(f"; {change}" for change in changes(weights.config, model)))
        yield taken(weights, own)


def taken(weights: Weights, otherwise: InitialValues) -> InitialValues:
    """Initial values from `weights`. Rows of a larger vocabulary that they lack come from `otherwise`.

    Reading a value raises UserError if it is NaN or infinite.
    """
    def values(name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Tensor:
        rows = min(size[0], max(0, weights.shapes[name][0] - offset[0]))
        if rows and rows == size[0]:
            return weights.finite(name, offset, size)
        value = otherwise(name, shape, offset, size).clone()
        if rows:
            value[:rows] = weights.finite(name, offset, (rows, *size[1:]))
        return value
    return values


def refuse_other_shape(path: Path, model: ModelConfig) -> None:
    """Raise UserError with all differences if a run of this shape cannot start from the weights in `path`. `vocab_size`
    may be unknown yet."""
    with open_weights(path) as weights:
        theirs = weights.config
    problems = [f"{name} is {own} here, {others} there"
                for name, (own, others) in model.differences(theirs, FREE).items()]
    assert theirs.vocab_size is not None
    if model.vocab_size is not None and model.vocab_size < theirs.vocab_size:
        problems.append(f"vocab_size is {model.vocab_size} here, {theirs.vocab_size} there: it may only grow (set "
                     f"model.vocab_size={theirs.vocab_size}, and take the tokenizer that belongs to the weights)")
    if problems:
        raise UserError(f"train.init_from: the weights in {path} are of another model:\n{listed(problems)}\n"
                        f"model.preset={path} takes their shape; rope_theta, rope_scaling and context_length may "
                        f"differ, and vocab_size may grow.")


def changes(theirs: ModelConfig, ours: ModelConfig) -> list[str]:
    """The intended changes as text: positions, and new rows of the vocabulary."""
    result = [f"{name} {getattr(theirs, name)} -> {getattr(ours, name)}" for name in POSITIONS
             if getattr(theirs, name) != getattr(ours, name)]
    assert ours.vocab_size is not None and theirs.vocab_size is not None
    if ours.vocab_size > theirs.vocab_size:
        result.append(f"{ours.vocab_size - theirs.vocab_size:,} new rows of the vocabulary, initialised as in a new "
                     f"model")
    return result


def refuse_other_tokenizer(path: Path, ours: Path) -> str:
    """Raise UserError if an id means another token for the weights than for the run; else say what was compared.

    Args:
        path: the folder in `train.init_from`.
        ours: the export of the run's tokenizer, in Hugging Face format.
    """
    theirs = tokenizer_of(path)
    if theirs is None:
        return (f"warning: there is no {TOKENIZER} or {MODEL_FILE}, so it is not known whether an id means the same "
                f"token for the weights as for this run")
    if theirs.read_bytes() == (ours / TOKENIZER).read_bytes():
        return "the same tokenizer"
    (old, old_merges), (new, new_merges) = _known(theirs), _known(ours / TOKENIZER)
    wrong = [f"id {index} is {token!r} there, {new.get(index)!r} here"
             for index, token in sorted(old.items()) if new.get(index) != token]
    if not wrong and theirs.name == TOKENIZER and old_merges != new_merges:
        wrong.append("the tokens are the same, but not how text is split into them (merges or scores)")
    if wrong:
        more = [f"and {len(wrong) - 3:,} more"] * (len(wrong) > 3)
        raise UserError(f"train.init_from: the weights in {path} were trained with another tokenizer, so that ids "
                        f"would mean something else:\n{listed([*wrong[:3], *more])}\nTake theirs, from the stage "
                        f"tokenizer on: {_taking(theirs, path)}")
    return f"the same {len(old):,} tokens"


def tokenizer_of(path: Path) -> Path | None:
    """The tokenizer.json of the weights: in their folder, or of the run that they belong to, which may have it from
    another run; else the tokenizer.model in their folder. UserError if a run's is gone."""
    if (run := run_of(path)) is None:
        folder = weights_folder(path)
        return next((place for name in (TOKENIZER, MODEL_FILE) if (place := folder / name).is_file()), None)
    try:
        result, why = run.stage_folder("tokenizer") / "hf" / TOKENIZER, ""
    except UserError as error:
        result, why = run.own_folder("tokenizer"), f" {error}"
    if not result.is_file():
        raise UserError(f"train.init_from: the tokenizer of the weights in {path} is not there ({result}).{why}\nPut "
                        f"it back, or start from the run's export (convert/hf), which has it too.")
    return result


def _taking(path: Path, weights: Path) -> str:
    """The settings that take the tokenizer in a file. A run's is taken as the tokenizer.model that the run has: an
    export keeps this file, and llama.cpp needs it. weights: `train.init_from`."""
    kind = "huggingface" if path.name == TOKENIZER else kind_of_model(path)
    if names_the_hub(str(weights)):
        return f"tokenizer.kind={kind} tokenizer.path={weights}"
    stage = path.parent.parent
    if (stage / RECORD).is_file() and (record := vocabulary_record(stage))["file"] == MODEL_FILE:
        kind, path = record["kind"], stage
    return f"tokenizer.kind={kind} tokenizer.path={path}"


def _known(path: Path) -> tuple[dict[int, str], Any]:
    """Tokens by id, and the merges or scores, of a tokenizer.json. Of a tokenizer.model, tokens without the special
    ones, whose names are not in the file, but with BOS and EOS. UserError if it cannot be read."""
    from tokenizers import Tokenizer
    if path.name == MODEL_FILE:
        opened = open_tokenizer(kind_of_model(path), path)
        unnamed = {*opened.special_tokens.values()} - {opened.bos_id, opened.eos_id}
        tokens = opened.backend.get_vocab()
        return {index: token for token, index in tokens.items() if index not in unnamed}, None
    try:
        result = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library has no other
        raise UserError(f"{path} cannot be compared with the run's tokenizer: reading it failed ({error}).") from None
    model = json.loads(result.to_str())["model"]
    return ({index: token for token, index in result.get_vocab().items()},
            model["vocab"] if model["type"] == "Unigram" else model.get("merges"))
