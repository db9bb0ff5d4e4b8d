"""Ready tokenizers (`tokenizer.path`): where their files are, and what is wrong with some."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import parsed_json, read_bytes, read_record, sha256_file
from drover.pipeline.tokenization.conversion import byte_tokenizer, converted
from drover.pipeline.tokenization.files import SETTINGS, ready_file
from drover.pipeline.tokenization.tokenizer import BOS, EOS, Tokenizer, padded

if TYPE_CHECKING:
    from drover.pipeline.config.tree import Config

TAKE_AGAIN = "Take it from the tokenizer's source again."
BOS_NAMES = (BOS, "<s>", "<bos>", "[BOS]", "<|bos|>", "<|startoftext|>", "<|endoftext|>")
EOS_NAMES = (EOS, "</s>", "<eos>", "[EOS]", "<|eos|>", "<|endoftext|>")
MOST_HOLES = 4
"""Ids for each token, at most: those of published tokenizers have hardly any hole."""
def open_tokenizer(kind: str, path: Path | None) -> Tokenizer:
    """The tokenizer in a file of that kind (`byte` has none); UserError if it is not one.

    BOS and EOS of a tokenizer.json are those that the tokenizer_config.json next to it names, or known names.
    """
    if path is None:
        return byte_tokenizer()
    if kind != "huggingface":
        return converted(kind, path)
    try:
        content = read_bytes(path)
        ids = _ids(parsed_json(content))
        last = max(ids, key=ids.__getitem__)
        if ids[last] >= MOST_HOLES * padded(len(ids)):
            raise UserError(f"{path} has {len(ids):,} tokens, and {last[:50]!r} has the id {ids[last]:,}: a model "
                            f"would need a row for each id up to it. Number the tokens from 0 on.")
        return Tokenizer(content, kind, find_bounds(path, ids), sha256_file(path))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever is wrong in the file
        raise UserError(f"{path} is not a tokenizer.json that the tokenizers library reads: {error}.") from None


def _ids(content: dict[str, Any]) -> dict[str, int]:
    """The ids of the tokens of a tokenizer.json. ValueError for merges that lack the required prefix: the library would
    cut bytes out of characters, which ends the process."""
    model = content["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges") or [] if prefix else []:
        _, second = merge.split(" ") if isinstance(merge, str) else merge
        if not second.startswith(prefix):
            raise ValueError(f"the merge {merge} has not the prefix {prefix!r}")
    vocab = model["vocab"]
    ids = vocab if isinstance(vocab, dict) else {piece: token for token, (piece, _) in enumerate(vocab)}
    return {**ids, **{token["content"]: token["id"] for token in content.get("added_tokens") or []}}


def find_bounds(path: Path, names: Container[str]) -> tuple[str, str]:
    """Names of BOS and EOS: from the `tokenizer_config.json` next to the file, else the first known names that it
    has."""
    settings = settings_beside(path)
    return (_bound("bos_token", BOS_NAMES, path, names, settings),
            _bound("eos_token", EOS_NAMES, path, names, settings))


def _bound(role: str, known: tuple[str, ...], path: Path, names: Container[str], settings: dict[str, Any]) -> str:
    value = settings.get(role)
    named = value.get("content") if isinstance(value, dict) else value
    if isinstance(named, str) and named not in names:
        raise UserError(f"{path.with_name(SETTINGS)} names the {role} {named}, which tokenizer.json does not have: "
                        f"transformers would add it with an id of its own. Name a token that is there, or remove the "
                        f"entry.")
    result = named if isinstance(named, str) else next((name for name in known if name in names), None)
    if result is None:
        raise UserError(f"{path} has no token that is known as {role[:3].upper()}, which Drover puts around every "
                        f"document. Name the tokens in a tokenizer_config.json next to it, for example "
                        f'{{"bos_token": "{BOS}", "eos_token": "{EOS}"}}, and add that token to the file '
                        f"(tokenizer.add_special_tokens) if it has none.")
    return result


def ready_problems(config: Config) -> list[str]:
    """Why the ready Hugging Face tokenizer that `tokenizer.path` names cannot be used, if it is there."""
    if config.tokenizer.kind != "huggingface" or config.tokenizer.path is None or \
            not (path := ready_file(config.tokenizer)).is_file():
        return []
    try:
        refuse_other_surroundings(path, open_tokenizer("huggingface", path))
    except UserError as error:
        return [str(error)]
    return []


def refuse_other_surroundings(path: Path, tokenizer: Tokenizer) -> None:
    """UserError if the post-processor of a tokenizer.json puts other ids around a text than BOS and EOS, with which
    Drover trains."""
    encoded = tokenizer.backend.encode("a")
    text = [at for at, special in enumerate(encoded.special_tokens_mask) if not special] or [len(encoded.ids)]
    before, after = encoded.ids[:text[0]], encoded.ids[text[-1] + 1:]
    first, last = tokenizer.bos_id, tokenizer.eos_id
    if before in ([], [first]) and after in ([], [last]):
        return
    bos, eos = tokenizer.bounds
    put = ", ".join(f"{token} ({tokenizer.backend.id_to_token(token) or 'no token'})" for token in (*before, *after))
    raise UserError(
        f"The post_processor of {path} puts {put} around a text, but BOS is {first} ({bos}) and EOS {last} "
        f"({eos}): the exported model would get other ids than in training. Name its tokens in {SETTINGS} "
        f"(bos_token, eos_token) if they are right. Otherwise correct it in Python: from tokenizers import "
        f"Tokenizer, processors; t = Tokenizer.from_file({str(path)!r}); t.post_processor = "
        f"processors.TemplateProcessing(single=[{bos!r}, '$A'], special_tokens=[({bos!r}, {first})]); "
        f"t.save({str(path)!r})")


def settings_beside(path: Path) -> dict[str, Any]:
    """The tokenizer_config.json next to a file; nothing if there is none."""
    return read_record(path.with_name(SETTINGS), dict[str, Any], TAKE_AGAIN) or {}
