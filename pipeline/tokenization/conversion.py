"""Vocabularies of other libraries as tokenizers of the Hugging Face library with the same ids, the ready tokenizers of
that library, and their export.

`agreement` compares with the ids of the other library.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UnusableInputError, UserError
from drover.pipeline.core.files import (
    atomic_file,
    parsed_json,
    read_bytes,
    read_record,
    sha256_file,
    write_json,
    write_text,
)
from drover.pipeline.tokenization.files import SETTINGS, SPLIT, ready_file, settings_beside
from drover.pipeline.tokenization.tokenizer import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    WORD_MARK,
    Tokenizer,
    byte_of_character,
    byte_piece,
    odd_strings,
    padded,
)

if TYPE_CHECKING:
    from drover.pipeline.config.tree import Config

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""How Llama 3 splits text before merging."""
NEVER = -1e6
"""A score that keeps a token out of every best path: in a unigram model of `tokenizers` any token can match."""
Agrees = Callable[[str, list[int]], bool]
"""Whether a library gives these ids for a text."""
AGAIN = "Run --stage tokenizer with --force."
BOS_NAMES = (BOS, "<s>", "<bos>", "[BOS]", "<|bos|>", "<|startoftext|>", "<|endoftext|>")
EOS_NAMES = (EOS, "</s>", "<eos>", "[EOS]", "<|eos|>", "<|endoftext|>")
MOST_HOLES = 4
"""Ids for each token, at most: those of published tokenizers have hardly any hole."""


def open_tokenizer(kind: str, path: Path | None) -> Tokenizer:
    """The tokenizer in a file of that kind (`byte` has none); UserError if it is not one, or cannot be converted.

    BOS and EOS of a tokenizer.json are those that the tokenizer_config.json next to it names, or known names.
    """
    if path is None:
        return byte_tokenizer()
    return {"sentencepiece": _sentencepiece, "tiktoken": _tiktoken, "bpe": _tiktoken, "char": _characters,
            "huggingface": _ready}[kind](path)


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of the UTF-8 text; the special ids follow."""
    from tokenizers import models
    return finished(byte_level_tokenizer(models.BPE(byte_of_character(), [])), "byte",
                    hashlib.sha256(bytes(range(256))).hexdigest())


def finished(library: Any, kind: str, sha256: str, specials: Iterable[str] = SPECIAL_TOKENS,
             bounds: tuple[str, str] = (BOS, EOS)) -> Tokenizer:
    """The tokenizer of a library's tokenizer, completed for export."""
    complete(library, specials, bounds[0])
    return Tokenizer(library, kind, bounds, sha256)


def complete(library: Any, specials: Iterable[str], bos: str) -> None:
    """Give a library's tokenizer special tokens, and BOS before a text by default."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    library.post_processor = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"],
                                                special_tokens=[(bos, library.token_to_id(bos))])


def write_hugging_face(tokenizer: Tokenizer, folder: Path) -> list[Path]:
    """Write `tokenizer.json` and `tokenizer_config.json` for `transformers.AutoTokenizer`; returns their paths.

    As with Llama 3, BOS is put before a text by default (`add_special_tokens=True`) and no EOS after it, and names of
    special tokens inside a text are those tokens, which chat templates need. In Drover's own encoding they are text.
    """
    (bos, eos), library = tokenizer.bounds, tokenizer.backend
    complete(library, tokenizer.special_tokens, bos)
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos,
        "clean_up_tokenization_spaces": False, SPLIT: False}
    if PAD in tokenizer.special_tokens:
        settings["pad_token"] = PAD
    if tokenizer.kind == "sentencepiece":  # llama.cpp's converter searches for the rule of the model here
        settings["add_prefix_space"] = "Prepend" in repr(library.normalizer)
    paths = [folder / "tokenizer.json", folder / SETTINGS]
    write_text(paths[0], library.to_str(pretty=True))
    write_json(paths[1], settings)
    return paths


def agreement(tokenizer: Tokenizer, path: Path | None) -> Agrees | None:
    """Whether the library of a tokenizer's file gives the same ids for a text; None for kinds without such a library.

    sentencepiece adds the scores of a unigram path in single precision over the whole text, so that rounding decides
    between splits that are equally likely. There a split with the same score counts as the same.
    """
    if path is None or tokenizer.kind not in ("sentencepiece", "tiktoken"):
        return None
    if tokenizer.kind == "tiktoken":
        from tiktoken import Encoding
        encoding = Encoding(path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=read_ranks(path), special_tokens={})
        return lambda text, ids: ids == encoding.encode_ordinary(text)
    from sentencepiece import SentencePieceProcessor
    processor = SentencePieceProcessor(model_proto=read_bytes(path))

    def agrees(text: str, ids: list[int]) -> bool:
        if (theirs := processor.encode(text)) == ids or tokenizer.model != "Unigram":
            return theirs == ids
        scores = [sum(map(processor.get_score, some)) for some in (ids, theirs)]
        return math.isclose(*scores, rel_tol=1e-5) and tokenizer.decode(ids) == tokenizer.decode(theirs)
    return agrees


def refuse_inexact(tokenizer: Tokenizer, path: Path | None) -> None:
    """UnusableInputError if the library of a tokenizer's file gives other ids for an odd text."""
    if (agrees := agreement(tokenizer, path)) is None:
        return
    for text in odd_strings(tokenizer):
        if not agrees(text, tokenizer.encode(text)):
            raise UnusableInputError(
                f"{path} cannot be converted exactly: {tokenizer.kind} itself gives other ids for {text!r:.80}. Models "
                f"that normalize text (other rules than `identity`, remove_extra_whitespaces) or have unusual pieces "
                f"cannot be used. Take the tokenizer.json that was published with it (tokenizer.kind=huggingface), or "
                f"let Drover train one (leave tokenizer.path out).")


def _sentencepiece(path: Path) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    try:
        processor = SentencePieceProcessor(model_proto=read_bytes(path))
    except (RuntimeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is not a sentencepiece model ({error}). If it holds lines of base64 and numbers, "
                        f"take tokenizer.kind=tiktoken.") from None
    bos, eos, unknown = processor.bos_id(), processor.eos_id(), processor.unk_id()
    schema: Any = sentencepiece_model_pb2
    model = schema.ModelProto.FromString(processor.serialized_model_proto())
    pieces = list(model.pieces)
    merges_by_score = model.trainer_spec.model_type == schema.TrainerSpec.BPE
    names = [piece.piece for piece in pieces]
    if bos < 0 or eos < 0:
        raise UserError(f"The sentencepiece model {path} has no BOS or no EOS piece, which Drover puts around every "
                        f"document. Train it with bos_id and eos_id set, or leave tokenizer.path out.")
    if (unknown < 0 and not merges_by_score) or not all(isinstance(name, str) for name in names):
        raise UserError(f"The sentencepiece model {path} is damaged: a piece is not UTF-8, or there is no unknown "
                        f"token. Take it from its source again.")
    normal = {piece.piece: token for token, piece in enumerate(pieces) if piece.type == piece.NORMAL}
    in_bytes = any(piece.type == piece.BYTE for piece in pieces)
    if merges_by_score:
        # sentencepiece merges any two neighbours whose union is a piece, best score first: all splits of all pieces.
        ranked = merges(normal, lambda piece: -pieces[normal[piece]].score)
        library = Backend(models.BPE({name: token for token, name in enumerate(names)}, ranked, fuse_unk=True,
                                       unk_token=names[unknown] if unknown >= 0 else None, byte_fallback=in_bytes))
    else:
        library = Backend(models.Unigram([(piece.piece, piece.score if piece.type == piece.NORMAL else NEVER)
                                            for piece in pieces], unknown, byte_fallback=in_bytes))
        # A name in a text whose characters are not all known would be likelier than these: split at the others.
        if strange := {*"".join(names[token] for token in range(len(names)) if names[token] not in normal)} - {
                *"".join(normal)}:
            library.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{''.join(map(re.escape, sorted(strange)))}]"),
                                                         "isolated")
    spaces, back = normalizers.Replace(" ", WORD_MARK), decoders.Replace(WORD_MARK, " ")
    prefix = model.normalizer_spec.add_dummy_prefix
    library.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), spaces]) if prefix else spaces
    library.decoder = decoders.Sequence([back, decoders.ByteFallback(), decoders.Fuse(),
                                         *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    library.add_tokens([AddedToken(piece.piece.replace(WORD_MARK, " "), normalized=False)
                        for piece in pieces if piece.type == piece.USER_DEFINED])
    return finished(library, "sentencepiece", sha256_file(path), [
        piece.piece for piece in pieces if piece.type == piece.CONTROL], (names[bos], names[eos]))


def _tiktoken(path: Path) -> Tokenizer:
    from tokenizers import models
    shown = {value: character for character, value in byte_of_character().items()}
    ids = {"".join(shown[value] for value in token): rank for token, rank in read_ranks(path).items()}
    # ignore_merges: like tiktoken, take a split-off piece that is a token whole, without merging up to it.
    model = models.BPE(ids, merges(ids, ids.__getitem__), ignore_merges=True)
    return finished(byte_level_tokenizer(model, LLAMA3_PATTERN), "tiktoken", sha256_file(path))


def read_ranks(path: Path) -> dict[bytes, int]:
    """The `base64 rank` lines of a file, ranks counted from 0; UserError naming the line that is not one."""
    ranks: dict[bytes, int] = {}
    try:
        lines = read_bytes(path).splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Correct tokenizer.path.") from None
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{path}:{number}: not a line of Llama 3's tokenizer.model (base64, a space, a rank). "
                            f"For a sentencepiece file take tokenizer.kind=sentencepiece, for a tokenizer.json "
                            f"tokenizer.kind=huggingface.") from None
    every_byte = {bytes([value]) for value in range(256)}
    if sorted(ranks.values()) != list(range(len(ranks))) or not every_byte <= ranks.keys():
        raise UserError(f"{path} has {len(ranks)} different tokens, but their ranks do not run from 0 to "
                        f"{len(ranks) - 1}, or some of the 256 single bytes are missing. It is damaged.")
    return ranks


def write_ranks(path: Path, tokens: Iterable[bytes]) -> None:
    """Write tokens in the order of their ranks as `read_ranks` reads them."""
    with atomic_file(path) as file:
        file.write(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))


def byte_level_tokenizer(model: Any, pattern: str | None = None) -> Any:
    """A `tokenizers.Tokenizer` around `model` that works on bytes, after a split by `pattern`."""
    from tokenizers import Regex, decoders, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    tokenizer = Backend(model)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = as_bytes if pattern is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merges(ids: Mapping[str, int], rank: Callable[[str], float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a third, ordered by the rank of the third, then by the ids of the two."""
    pairs = [(rank(token), ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:]) for token in ids
             for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids]
    return [(left, right) for *_, left, right in sorted(pairs)]


@dataclass(frozen=True)
class CharacterVocabulary:
    """The file of a tokenizer of characters: those of the training split by code point.

    Bytes and the special ids follow. Other characters are spelled in bytes, so nothing is lost and the validation loss
    stays honest. With one id for all unknown characters, the model could predict several bytes at once.
    """

    characters: str


def _characters(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    record = read_record(path, CharacterVocabulary, AGAIN)
    known = record.characters if record else ""
    if len(set(known)) != max(1, len(known)):
        raise UserError(f"{path} is not a list of different characters. {AGAIN}")
    ids = {name: token for token, name in enumerate([*known, *map(byte_piece, range(256))])}
    library = Backend(models.BPE(ids, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return finished(library, "char", sha256_file(path))


def write_characters(path: Path, texts: Iterable[str]) -> None:
    """Collect the characters of `texts` into the file of a tokenizer of characters."""
    seen = set(chain.from_iterable(texts))
    if not seen:
        raise UserError("There is no training text to take characters from. Look at the shard stage's sources.")
    write_json(path, {"characters": "".join(sorted(seen))})


def _ready(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    try:
        content = read_bytes(path)
        model = parsed_json(content)["model"]
        prefix = model.get("continuing_subword_prefix") or ""
        for merge in model.get("merges") or [] if prefix else []:
            _, second = merge.split(" ") if isinstance(merge, str) else merge
            if not second.startswith(prefix):  # the library would cut bytes out of characters, which ends the process
                raise ValueError(f"the merge {merge} has not the prefix {prefix!r}")
        library = Backend.from_str(content.decode())
        names = library.get_vocab()
        bounds = _bound("bos_token", BOS_NAMES, path, names), _bound("eos_token", EOS_NAMES, path, names)
        tokenizer = Tokenizer(library, "huggingface", bounds, sha256_file(path))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever is wrong in the file
        raise UserError(f"{path} is not a tokenizer.json that the tokenizers library reads: {error}.") from None
    if tokenizer.used > MOST_HOLES * padded(len(names)):
        last = max(names, key=names.__getitem__)
        raise UserError(f"{path} has {len(names):,} tokens, and {last[:50]!r} has the id {names[last]:,}: a model "
                        f"would need a row for each id up to it. Number the tokens from 0 on.")
    return tokenizer


def _bound(role: str, known: tuple[str, ...], path: Path, names: Container[str]) -> str:
    """The name of BOS or EOS: from the tokenizer_config.json next to a file, else the first known name that it has."""
    value = settings_beside(path).get(role)
    named = value.get("content") if isinstance(value, dict) else value
    if isinstance(named, str):
        known = (named,)
    for name in known:
        if name in names:
            return name
    raise UserError(f"{path} has no token {' or '.join(known)}: Drover puts the {role} around every document, and the "
                    f"model would have no row for it. Name one that is there in a {SETTINGS} next to it, for example "
                    f'{{"bos_token": "{BOS}", "eos_token": "{EOS}"}}, or add it to the file '
                    f"(tokenizer.add_special_tokens).")


def ready_problems(config: Config) -> list[str]:
    """Why the ready Hugging Face tokenizer that `tokenizer.path` names cannot be used, if it is there."""
    settings = config.tokenizer
    if settings.kind == "huggingface" and settings.path is not None and (path := ready_file(settings)).is_file():
        try:
            refuse_other_surroundings(path, open_tokenizer("huggingface", path))
        except UserError as error:
            return [str(error)]
    return []


def refuse_other_surroundings(path: Path, tokenizer: Tokenizer) -> None:
    """UserError if the post-processor of a tokenizer.json puts other ids around a text than BOS and EOS, with which
    Drover trains."""
    ids = tokenizer.backend.encode("a").ids
    if ids in tokenizer.surrounded(tokenizer.encode("a")):
        return
    bos, eos = tokenizer.bounds
    shown = ", ".join(f"{token} ({tokenizer.backend.id_to_token(token) or 'no token'})" for token in ids)
    raise UserError(
        f"The post_processor of {path} makes {shown} of the text 'a', but BOS is {tokenizer.bos_id} ({bos}) and EOS "
        f"{tokenizer.eos_id} ({eos}): the exported model would get other ids than in training. Name its tokens in "
        f"{SETTINGS} (bos_token, eos_token) if they are right. Otherwise correct it in Python: from tokenizers import "
        f"Tokenizer, processors; t = Tokenizer.from_file({str(path)!r}); t.post_processor = "
        f"processors.TemplateProcessing(single=[{bos!r}, '$A'], special_tokens=[({bos!r}, {tokenizer.bos_id})]); "
        f"t.save({str(path)!r})")
