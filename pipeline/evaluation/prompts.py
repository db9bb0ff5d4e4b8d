"""From text to a model's prompt: tokenizers, ids, and the ids that end a generated text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.open_model import OpenedModel
from drover.pipeline.records.generation_settings import stated_settings

if TYPE_CHECKING:
    from drover.pipeline.tokenization.tokenizer import Tokenizer

END_OF_TURN = "<|eot_id|>"
"""The end of a turn of a conversation in Llama 3's tokenizers."""


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
