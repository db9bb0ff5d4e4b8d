"""Any `tokenizer.json` of the Hugging Face `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import parsed_json, read_bytes, read_record, sha256_file
from drover.pipeline.tokenization.base import BOS, EOS, WORD_MARK, Flat, Tokenizer, byte_piece, encoded_flat, padded
from drover.pipeline.tokenization.byte_level import byte_of_character

SETTINGS = "tokenizer_config.json"
TAKE_AGAIN = "Take it from the tokenizer's source again."
BOS_NAMES = (BOS, "<s>", "<bos>", "[BOS]", "<|bos|>", "<|startoftext|>", "<|endoftext|>")
EOS_NAMES = (EOS, "</s>", "<eos>", "[EOS]", "<|eos|>", "<|endoftext|>")
MOST_HOLES = 4
"""Ids for each token, at most: those of published tokenizers have hardly any hole."""


class HuggingFaceTokenizer(Tokenizer):
    """The file's own tokens and special tokens; its truncation and padding are switched off."""

    kind = "huggingface"

    def __init__(self, path: Path, bounds: tuple[str, str] | None = None) -> None:
        """Read the file.

        Args:
            path: `tokenizer.json`.
            bounds: names of the BOS and EOS tokens; None: from the tokenizer_config.json next to it, or by known names.

        Raises:
            UserError: not such a file, or BOS or EOS cannot be found.
        """
        from tokenizers import Tokenizer
        try:
            text = read_bytes(path).decode()
            _refuse_wrong_prefixes(parsed_json(text.encode()))
            self.tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever is wrong in the file
            raise UserError(f"{path} is not a tokenizer.json that the tokenizers library reads: {error}.") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # their names in a document stay text
        ids = self.tokenizer.get_vocab()
        self._names = {token: name for name, token in ids.items()}
        self.used = max(self._names) + 1
        if self.used > MOST_HOLES * padded(len(ids)):  # the library writes itself with a place for each hole
            raise UserError(f"{path} has {len(ids):,} tokens, and {self._names[self.used - 1][:50]!r} has the id "
                            f"{self.used - 1:,}: a model would need a row for each id up to it. Number the tokens "
                            f"from 0 on.")
        bos, eos = bounds or find_bounds(path, set(ids))
        self.bos_id, self.eos_id = ids[bos], ids[eos]
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: index for index, token in added.items() if token.special}
        self.special_tokens |= {bos: self.bos_id, eos: self.eos_id}
        self._special_array = np.array(sorted(self.special_tokens.values()), np.int64)
        self.added = {index: token.content for index, token in added.items()}
        parts: dict[str, Any] = json.loads(self.tokenizer.to_str())
        decoder = json.dumps(parts["decoder"])  # parts of it may hold further ones
        self._byte_of = byte_of_character() if '"type": "ByteLevel"' in decoder else {}
        unknown = parts["model"].get("unk_token")
        self.unk_id = ids.get(unknown) if isinstance(unknown, str) else parts["model"].get("unk_id")
        if parts["model"].get("byte_fallback"):
            self.byte_fallback_ids = frozenset(ids[name] for name in map(byte_piece, range(256)) if name in ids)
        self.sha256 = sha256_file(path)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        return encoded_flat(self.tokenizer, texts)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        known = self.all_checked(ids)
        kept = (known < self.used) & ~np.isin(known, self._special_array)
        return self.tokenizer.decode(known[kept].tolist())

    def token_bytes(self, token: int) -> bytes:
        if self.checked(token) not in self._names or token in self.special_ids or token == self.unk_id:
            return b""
        if token in self.added:
            return self.added[token].encode()
        name = self._names[token]
        if token in self.byte_fallback_ids:
            return bytes([int(name[3:5], 16)])
        if self._byte_of:
            return bytes(self._byte_of[character] for character in name if character in self._byte_of)
        return name.replace(WORD_MARK, " ").encode()

    def hugging_face(self) -> Any:
        from tokenizers import Tokenizer
        return Tokenizer.from_str(self.tokenizer.to_str())


def _refuse_wrong_prefixes(content: dict[str, Any]) -> None:
    """ValueError for merges that lack the required prefix: the library would cut bytes out of characters, which ends
    the process."""
    prefix = content["model"].get("continuing_subword_prefix") or ""
    for merge in content["model"].get("merges") or [] if prefix else []:
        _, second = merge.split(" ") if isinstance(merge, str) else merge
        if not second.startswith(prefix):
            raise ValueError(f"the merge {merge} has not the prefix {prefix!r}")


def find_bounds(path: Path, names: set[str]) -> tuple[str, str]:
    """Names of BOS and EOS: from the `tokenizer_config.json` next to the file, else the first known names that it
    has."""
    said = _settings_beside(path)
    found = {word: _said(said.get(f"{word.lower()}_token"), names) or next((one for one in known if one in names), "")
             for word, known in (("BOS", BOS_NAMES), ("EOS", EOS_NAMES))}
    if lacking := [word for word, name in found.items() if not name]:
        raise UserError(f"{path} has no token that is known as {' and '.join(lacking)}, which Drover puts around every "
                        f"document. Name the tokens in a tokenizer_config.json next to it, for example "
                        f'{{"bos_token": "{BOS}", "eos_token": "{EOS}"}}, and add that token to the file '
                        f"(tokenizer.add_special_tokens) if it has none.")
    return found["BOS"], found["EOS"]


def surrounding_problems(path: Path, tokenizer: HuggingFaceTokenizer) -> list[str]:
    """Why a tokenizer.json cannot be exported: it names BOS or EOS tokens that it does not have, or it puts other ids
    around a text than BOS and EOS, with which Drover trains."""
    settings = _settings_beside(path)
    names = tokenizer.tokenizer.get_vocab()
    named = {role: name for role in ("bos_token", "eos_token") if (name := _name(settings.get(role))) is not None}
    found = [f"{path.with_name(SETTINGS)} names the {role} {name}, which tokenizer.json does not have: transformers "
             f"would add it with an id of its own. Name a token that is there ({', '.join(tokenizer.bounds)}), or "
             f"remove the entry." for role, name in named.items() if name not in names]
    first, last = tokenizer.bos_id, tokenizer.eos_id
    bos, eos = tokenizer.bounds
    before, after = surrounding(tokenizer)
    if before not in ([], [first]) or after not in ([], [last]):
        put = ", ".join(f"{token} ({tokenizer.tokenizer.id_to_token(token) or 'no token'})"
                        for token in (*before, *after))
        found.append(
            f"The post_processor of {path} puts {put} around a text, but BOS is {first} ({bos}) and EOS {last} "
            f"({eos}): the exported model would get other ids than in training. Name its tokens in {SETTINGS} "
            f"(bos_token, eos_token) if they are right. Otherwise correct it in Python: from tokenizers import "
            f"Tokenizer, processors; t = Tokenizer.from_file({str(path)!r}); t.post_processor = "
            f"processors.TemplateProcessing(single=[{bos!r}, '$A'], special_tokens=[({bos!r}, {first})]); "
            f"t.save({str(path)!r})")
    return found


def surrounding(tokenizer: HuggingFaceTokenizer) -> tuple[list[int], list[int]]:
    """The ids that the template of the post-processor puts before and after a text."""
    encoded = tokenizer.tokenizer.encode("a")
    text = [at for at, special in enumerate(encoded.special_tokens_mask) if not special] or [len(encoded.ids)]
    return encoded.ids[:text[0]], encoded.ids[text[-1] + 1:]


def bos_contradiction(path: Path, tokenizer: HuggingFaceTokenizer) -> str | None:
    """A sentence if tokenizer_config.json and the post-processor differ in whether BOS is put before a text."""
    wanted, (before, _) = _settings_beside(path).get("add_bos_token"), surrounding(tokenizer)
    if not isinstance(wanted, bool) or wanted == bool(before):
        return None
    return (f"{path.with_name(SETTINGS)} has add_bos_token {json.dumps(wanted)}, but the post_processor of "
            f"tokenizer.json puts {tokenizer.bounds[0] if before else 'nothing'} before a text. Programs follow the "
            f"one or the other; transformers 5 mostly the latter")


def _settings_beside(path: Path) -> dict[str, Any]:
    return read_record(path.with_name(SETTINGS), dict[str, Any], TAKE_AGAIN) or {}


def _name(value: Any) -> str | None:
    """The name of a special token as tokenizer_config.json has it."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _said(value: Any, names: set[str]) -> str | None:
    return name if (name := _name(value)) in names else None
