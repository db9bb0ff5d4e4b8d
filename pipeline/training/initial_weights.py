"""Training that starts from somebody's weights (`train.init_from`) instead of random ones.

Each rank reads the part of every parameter that it holds. The optimizer, the schedule and the data begin anew. What may
differ from the weights' own model is how positions are turned (theta, scaling, context), which is how a context is
extended, and a larger vocabulary, whose new rows start as in a new model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from drover.model.config import ModelConfig
from drover.pipeline.config.shapes import POSITIONS
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.formats.weights import Weights, open_weights
from drover.pipeline.parallel.initial_values import InitialValues, drawn
from drover.pipeline.parallel.ranks import Ranks
from drover.pipeline.records.generation_settings import keep_settings
from drover.pipeline.records.weight_files import RUN

DEPARTURES = ("qkv_bias", "qk_norm", "sliding_window", "full_attention_interval", "no_rope_layer_interval")
"""Where Llama's descendants differ."""
SAME = {"dim": "dim", "layers": "layers", "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_width",
        "ffn_dim": "hidden",
        "tied_embeddings": "tied_embeddings", "norm_eps": "norm_eps", **{name: name for name in DEPARTURES}}
"""What must be the weights' own: the setting that says it, and where a ModelConfig has it."""
TOKENIZER = "tokenizer.json"


@contextmanager
def initial_values(work: Work, model: ModelConfig, ranks: Ranks, *, begun: bool) -> Iterator[InitialValues | None]:
    """What the parameters of a training start from, as long as the context is open; None where a checkpoint of its own
    has them.

    Args:
        model: the shape that is trained, `vocab_size` known.

    Raises:
        UserError: the weights of `train.init_from` are not there, damaged, or of another shape or tokenizer; the same
            on every rank. Later, when they are read, for NaN and infinite values.
    """
    if begun:
        yield None
        return
    own, start = drawn(model, work.config.seed), work.config.train.init_from
    if start is None:
        if ranks.leads:
            _keep_settings(work, None)
        yield own
        return
    path = Path(start)

    def checked() -> str:
        refuse_other_shape(path, model)
        compared = refuse_other_tokenizer(path, work.input("tokenizer")[0] / "hf")
        _keep_settings(work, path)
        return compared
    compared = ranks.by_leader(checked)
    with open_weights(path) as weights:
        if ranks.leads:
            work.say(f"starts from the weights in {weights.path} ({weights.form}; {compared})"
                     + "".join(f"; {change}" for change in changes(weights.config, model)))
        yield taken(weights, own)


def _keep_settings(work: Work, path: Path | None) -> None:
    ids = work.input("tokenizer")[1].counts
    keep_settings(path, work.folder, ids["bos_id"], ids["eos_id"])


def taken(weights: Weights, otherwise: InitialValues) -> InitialValues:
    """Initial values from `weights`; rows that they lack, of a vocabulary that has grown, from `otherwise`.

    Raises UserError, when read, for NaN and infinite values.
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
    """UserError, with everything that differs, if a run of this shape cannot start from the weights in `path`;
    `vocab_size` may not be known yet."""
    with open_weights(path) as weights:
        theirs = weights.config
    found = [f"{name} is {getattr(model, value)} here, {getattr(theirs, value)} there" for name, value in SAME.items()
             if getattr(model, value) != getattr(theirs, value)]
    assert theirs.vocab_size is not None
    if model.vocab_size is not None and model.vocab_size < theirs.vocab_size:
        found.append(f"vocab_size is {model.vocab_size} here, {theirs.vocab_size} there: it may only grow (set "
                     f"model.vocab_size={theirs.vocab_size}, and take the tokenizer that belongs to the weights)")
    if found:
        raise UserError(f"train.init_from: the weights in {path} are of another model:\n{listed(found)}\n"
                        f"model.preset={path} takes their shape; rope_theta, rope_scaling and context_length may "
                        f"differ, and vocab_size may grow.")


def changes(theirs: ModelConfig, ours: ModelConfig) -> list[str]:
    """What is changed on purpose, in words: positions, and rows of the vocabulary."""
    found = [f"{name} {getattr(theirs, name)} -> {getattr(ours, name)}" for name in POSITIONS
             if getattr(theirs, name) != getattr(ours, name)]
    assert ours.vocab_size is not None and theirs.vocab_size is not None
    if ours.vocab_size > theirs.vocab_size:
        found.append(f"{ours.vocab_size - theirs.vocab_size:,} new rows of the vocabulary, initialised as in a new "
                     f"model")
    return found


def refuse_other_tokenizer(path: Path, ours: Path) -> str:
    """UserError if the weights know other tokens by their ids than the run does; else what was compared, in words.

    Args:
        path: what `train.init_from` says.
        ours: the export of the run's tokenizer, in Hugging Face's form.
    """
    theirs = tokenizer_of(path)
    if theirs is None:
        return f"no {TOKENIZER} there to compare the tokenizer with"
    if theirs.read_bytes() == (ours / TOKENIZER).read_bytes():
        return "the same tokenizer"
    (old, old_merges), (new, new_merges) = _known(theirs), _known(ours / TOKENIZER)
    wrong = [f"id {index} is {token!r} there, {new.get(index)!r} here"
             for index, token in sorted(old.items()) if new.get(index) != token]
    if not wrong and old_merges != new_merges:
        wrong.append("the tokens are the same, but not how text is split into them (merges)")
    if wrong:
        more = [f"and {len(wrong) - 3:,} more"] * (len(wrong) > 3)
        raise UserError(f"train.init_from: the weights in {path} were trained with another tokenizer, so that ids "
                        f"would mean something else:\n{listed([*wrong[:3], *more])}\nTake theirs: "
                        f"tokenizer.kind=huggingface tokenizer.path={theirs}, from the stage tokenizer on.")
    return f"the same {len(old):,} tokens"


def tokenizer_of(path: Path) -> Path | None:
    """The tokenizer.json that belongs to weights: beside them, or of the run that they lie in."""
    places = [path, *(folder / "tokenizer" / "hf" for folder in (path, *path.absolute().parents[:3])
                      if (folder / RUN).is_file())]
    return next((place / TOKENIZER for place in places if (place / TOKENIZER).is_file()), None)


def _known(path: Path) -> tuple[dict[int, str], Any]:
    """Tokens by id, and the merges, of a tokenizer.json. UserError if it is none."""
    from tokenizers import Tokenizer
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library has no other
        raise UserError(f"{path} cannot be compared with the run's tokenizer: it is not read ({error}).") from None
    return ({index: token for token, index in found.get_vocab().items()},
            json.loads(found.to_str())["model"].get("merges"))
