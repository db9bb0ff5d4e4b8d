"""Vocabularies of other libraries as tokenizers of the Hugging Face library with the same ids.

`agreement` compares with the ids of the other library.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drover.pipeline.core.errors import UnusableInputError, UserError
from drover.pipeline.core.files import atomic_file, read_bytes, read_record, sha256_file, write_json
from drover.pipeline.tokenization.odd_strings import odd_strings
from drover.pipeline.tokenization.tokenizer import (
    BOS,
    EOS,
    SPECIAL_TOKENS,
    WORD_MARK,
    Tokenizer,
    byte_of_character,
    byte_piece,
)

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""How Llama 3 splits text before merging."""
NEVER = -1e6
"""A score that keeps a token out of every best path: in a unigram model of `tokenizers` any token can match."""
AGAIN = "Run --stage tokenizer with --force."


def converted(kind: str, path: Path) -> Tokenizer:
    """The tokenizer with the ids of a sentencepiece model, a tiktoken file or a list of characters; UserError if the
    file is not one, or cannot be converted."""
    library, specials, bounds = {"sentencepiece": _sentencepiece, "tiktoken": _tiktoken, "bpe": _tiktoken,
                                 "char": _characters}[kind](path)
    return finished(library, "tiktoken" if kind == "bpe" else kind, sha256_file(path), specials, bounds)


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of the UTF-8 text; the special ids follow."""
    from tokenizers import models
    return finished(byte_level_tokenizer(models.BPE(byte_of_character(), [])), "byte",
                    hashlib.sha256(bytes(range(256))).hexdigest())


def finished(library: Any, kind: str, sha256: str, specials: Iterable[str] = SPECIAL_TOKENS,
             bounds: tuple[str, str] = (BOS, EOS)) -> Tokenizer:
    """The tokenizer of a library's tokenizer, completed for export."""
    complete(library, specials, bounds[0])
    return Tokenizer(library.to_str().encode(), kind, bounds, sha256)


def complete(library: Any, specials: Iterable[str], bos: str) -> None:
    """Give a library's tokenizer special tokens, and BOS before a text by default."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    library.post_processor = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"],
                                                special_tokens=[(bos, library.token_to_id(bos))])


def agreement(tokenizer: Tokenizer, path: Path | None) -> Callable[[str, list[int]], bool] | None:
    """Whether the library of a tokenizer's file gives the same ids for a text; None for kinds without such a library.

    sentencepiece adds the scores of a unigram path in single precision over the whole text, so that rounding decides
    between splits that are equally likely. There a split with the same score counts as the same.
    """
    if path is None or tokenizer.kind not in ("sentencepiece", "tiktoken"):
        return None
    if tokenizer.kind == "tiktoken":
        from tiktoken import Encoding
        encoding = Encoding(path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=read_ranks(path), special_tokens={})
        return lambda text, ids: ids == [
            token for part in tokenizer.parts(text) for token in encoding.encode_ordinary(part)]
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
    agrees = agreement(tokenizer, path)
    for text in odd_strings(tokenizer) if agrees else ():
        if agrees and not agrees(text, tokenizer.encode(text)):
            raise UnusableInputError(
                f"{path} cannot be converted exactly: {tokenizer.kind} itself gives other ids for {text!r:.80}. Models "
                f"that normalize text (other rules than `identity`, remove_extra_whitespaces) or have unusual pieces "
                f"cannot be used. Take the tokenizer.json that was published with it (tokenizer.kind=huggingface), or "
                f"let Drover train one (leave tokenizer.path out).")


def _sentencepiece(path: Path) -> tuple[Any, list[str], tuple[str, str]]:
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    try:
        processor = SentencePieceProcessor(model_proto=read_bytes(path))
    except (RuntimeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is not a sentencepiece model ({error}). If it holds lines of base64 and numbers, "
                        f"take tokenizer.kind=tiktoken.") from None
    bos, eos, unknown = processor.bos_id(), processor.eos_id(), processor.unk_id()
    if bos < 0 or eos < 0:
        raise UserError(f"The sentencepiece model {path} has no BOS or no EOS piece, which Drover puts around "
                        f"every document. Train it with bos_id and eos_id set, or leave tokenizer.path out.")
    schema: Any = sentencepiece_model_pb2
    model = schema.ModelProto.FromString(processor.serialized_model_proto())
    rules, pieces = model.normalizer_spec, list(model.pieces)
    merges_by_score = model.trainer_spec.model_type == schema.TrainerSpec.BPE
    if not all(isinstance(piece.piece, str) for piece in pieces) or (unknown < 0 and not merges_by_score):
        raise UserError(f"The sentencepiece model {path} is damaged: a piece is not UTF-8, or there is no unknown "
                        f"token. Take it from its source again.")
    names, normal = [piece.piece for piece in pieces], {
        piece.piece: token for token, piece in enumerate(pieces) if piece.type == piece.NORMAL}
    in_bytes = any(piece.type == piece.BYTE for piece in pieces)
    if merges_by_score:
        # sentencepiece merges any two neighbours whose union is a piece, best score first: all splits of all pieces.
        ranked = merges(normal, lambda piece: -pieces[normal[piece]].score)
        library = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, ranked, fuse_unk=True,
                                       unk_token=names[unknown] if unknown >= 0 else None, byte_fallback=in_bytes))
    else:
        library = Tokenizer(models.Unigram([(piece.piece, piece.score if piece.type == piece.NORMAL else NEVER)
                                            for piece in pieces], unknown, byte_fallback=in_bytes))
        # A name in a text whose characters are not all known would be likelier than these: split at the others.
        if strange := {*"".join(names[token] for token in range(len(names)) if names[token] not in normal)} - {
                *"".join(normal)}:
            library.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{''.join(map(re.escape, sorted(strange)))}]"),
                                                         "isolated")
    spaces, back = normalizers.Replace(" ", WORD_MARK), decoders.Replace(WORD_MARK, " ")
    prefix = rules.add_dummy_prefix
    library.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), spaces]) if prefix else spaces
    library.decoder = decoders.Sequence([back, decoders.ByteFallback(), decoders.Fuse(),
                                         *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    library.add_tokens([AddedToken(piece.piece.replace(WORD_MARK, " "), normalized=False)
                        for piece in pieces if piece.type == piece.USER_DEFINED])
    return library, [piece.piece for piece in pieces if piece.type == piece.CONTROL], (names[bos], names[eos])


def _tiktoken(path: Path) -> tuple[Any, Sequence[str], tuple[str, str]]:
    from tokenizers import models
    shown = {value: character for character, value in byte_of_character().items()}
    ids = {"".join(shown[value] for value in token): rank for token, rank in read_ranks(path).items()}
    # ignore_merges: like tiktoken, take a split-off piece that is a token whole, without merging up to it.
    model = models.BPE(ids, merges(ids, ids.__getitem__), ignore_merges=True)
    return byte_level_tokenizer(model, LLAMA3_PATTERN), SPECIAL_TOKENS, (BOS, EOS)


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
        except (ValueError, binascii.Error):
            raise UserError(f"{path}:{number}: not a line of Llama 3's tokenizer.model (base64, a space, a rank). "
                            f"For a sentencepiece file take tokenizer.kind=sentencepiece, for a tokenizer.json "
                            f"tokenizer.kind=huggingface.") from None
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or missing:
        raise UserError(f"{path} has {len(ranks)} different tokens, but their ranks do not run from 0 to "
                        f"{len(ranks) - 1}, or some of the 256 single bytes are missing ({missing}). It is damaged.")
    return ranks


def write_ranks(path: Path, tokens: Iterable[bytes]) -> None:
    """Write tokens in the order of their ranks as `read_ranks` reads them."""
    with atomic_file(path) as file:
        file.write(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))


def byte_level_tokenizer(model: Any, pattern: str | None = None) -> Any:
    """A `tokenizers.Tokenizer` around `model` that works on bytes, after a split by `pattern`."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    tokenizer = Tokenizer(model)
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


def _characters(path: Path) -> tuple[Any, Sequence[str], tuple[str, str]]:
    from tokenizers import Tokenizer, decoders, models
    record = read_record(path, CharacterVocabulary, AGAIN)
    known = record.characters if record else ""
    if len(set(known)) != max(1, len(known)):
        raise UserError(f"{path} is not a list of different characters. {AGAIN}")
    ids = {name: token for token, name in enumerate([*known, *map(byte_piece, range(256))])}
    library = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return library, SPECIAL_TOKENS, (BOS, EOS)


def write_characters(path: Path, texts: Iterable[str]) -> None:
    """Collect the characters of `texts` into the file of a tokenizer of characters."""
    seen: set[str] = set()
    for text in texts:
        seen.update(text)
    if not seen:
        raise UserError("There is no training text to take characters from. Look at the shard stage's sources.")
    write_json(path, {"characters": "".join(sorted(seen))})
