"""A sentencepiece model as a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_bytes, sha256_file
from drover.pipeline.tokenization.base import WORD_MARK, Flat, Tokenizer, encoded_flat, joined
from drover.pipeline.tokenization.byte_level import merges

NEVER = -1e6
"""A score that keeps a token out of every best path: in a unigram model of `tokenizers` any token can match."""


class SentencePieceTokenizer(Tokenizer):
    """A model trained here (no dummy prefix, identity normalisation) or a ready one that has BOS and EOS."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        """Read the model; UserError if it is none, or lacks BOS or EOS."""
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
        try:
            self.processor = processor = SentencePieceProcessor(model_proto=read_bytes(path))
        except (RuntimeError, UnicodeDecodeError, OSError) as error:
            raise UserError(f"{path} is not a sentencepiece model ({error}). If it holds lines of base64 and numbers, "
                            f"take tokenizer.kind=tiktoken.") from None
        self.used = len(processor)
        self.bos_id, self.eos_id, unknown = processor.bos_id(), processor.eos_id(), processor.unk_id()
        if self.bos_id < 0 or self.eos_id < 0:
            raise UserError(f"The sentencepiece model {path} has no BOS or no EOS piece, which Drover puts around "
                            f"every document. Train it with bos_id and eos_id set, or leave tokenizer.path out.")
        self.unk_id = unknown if unknown >= 0 else None
        self.byte_fallback_ids = frozenset(token for token in range(self.used) if processor.is_byte(token))
        self.sha256 = sha256_file(path)
        schema: Any = sentencepiece_model_pb2
        self._model = schema.ModelProto.FromString(processor.serialized_model_proto())
        self.merges_by_score = self._model.trainer_spec.model_type == schema.TrainerSpec.BPE
        self.prefix_space = self._model.normalizer_spec.add_dummy_prefix
        if not all(isinstance(piece.piece, str) for piece in self._model.pieces) or \
                (self.unk_id is None and not self.merges_by_score):
            raise UserError(f"The sentencepiece model {path} is damaged: a piece is not UTF-8, or there is no unknown "
                            f"token. Take it from its source again.")
        self.special_tokens = {processor.id_to_piece(token): token for token in range(self.used)
                               if processor.is_control(token)}
        self._unigram = None if self.merges_by_score else self.hugging_face()

    def encode(self, text: str) -> list[int]:
        # sentencepiece adds up a unigram path's scores in single precision over the whole text, so in long documents
        # rounding picks the pieces, and no other program finds the same ones. The exported tokenizer adds in double
        # precision and is what the model's users will run: it encodes here too.
        if self._unigram is not None:
            return list(self._unigram.encode(text, add_special_tokens=False).ids)
        return list(self.processor.encode(text))

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        if self._unigram is not None:
            return encoded_flat(self._unigram, texts)
        return joined([self.processor.encode_as_numpy(text) for text in texts])

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        # sentencepiece's own decoding also takes away the space that some ready models put before a text.
        known = self.all_checked(ids)
        text: str = self.processor.decode(known[known < self.used].tolist())
        return text

    def token_bytes(self, token: int) -> bytes:
        if self.checked(token) >= self.used or token in self.special_ids or token == self.unk_id:
            return b""
        piece: str = self.processor.id_to_piece(int(token))
        if token in self.byte_fallback_ids:
            return bytes([int(piece[3:5], 16)])
        return piece.replace(WORD_MARK, " ").encode()

    def hugging_face(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, normalizers
        tokenizer = Tokenizer(self._bpe() if self.merges_by_score else self._path_model())
        spaces, back = normalizers.Replace(" ", WORD_MARK), decoders.Replace(WORD_MARK, " ")
        prefix = self.prefix_space
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), spaces]) if prefix else spaces
        tokenizer.decoder = decoders.Sequence([back, decoders.ByteFallback(), decoders.Fuse(),
                                               *([decoders.Strip(" ", 1, 0)] if prefix else [])])
        tokenizer.add_tokens([AddedToken(piece.piece.replace(WORD_MARK, " "), normalized=False)
                              for piece in self._model.pieces if piece.type == piece.USER_DEFINED])
        return tokenizer

    def _bpe(self) -> Any:
        from tokenizers import models
        pieces = list(enumerate(self._model.pieces))
        scores = {piece.piece: piece.score for _, piece in pieces}
        # sentencepiece merges any two neighbours whose union is a piece, best score first: all splits of all pieces.
        ranked = merges({piece.piece: token for token, piece in pieces if piece.type == piece.NORMAL},
                        lambda piece: -scores[piece])
        unknown = self.processor.id_to_piece(self.unk_id) if self.unk_id is not None else None
        return models.BPE({piece.piece: token for token, piece in pieces}, ranked, unk_token=unknown, fuse_unk=True,
                          byte_fallback=bool(self.byte_fallback_ids))

    def _path_model(self) -> Any:
        from tokenizers import models
        scored = [(piece.piece, piece.score if piece.type == piece.NORMAL else NEVER) for piece in self._model.pieces]
        return models.Unigram(scored, self.unk_id, byte_fallback=bool(self.byte_fallback_ids))
