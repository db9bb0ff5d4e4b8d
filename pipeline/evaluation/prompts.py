"""What a text becomes before a model continues it, and what ends the model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_record
from drover.pipeline.evaluation.open_model import OpenedModel, run_of
from drover.pipeline.records.generation_settings import read_settings, settings_file

if TYPE_CHECKING:
    from drover.pipeline.tokenization.base import Tokenizer

END_OF_TURN = "<|eot_id|>"
"""What ends a turn of a conversation in Llama 3's tokenizers."""


def prompt_ids(opened: OpenedModel, text: str) -> list[int]:
    """The ids of a text to be continued: BOS, as before every document in training, and the text's."""
    return [opened.tokenizer.bos_id, *opened.tokenizer.encode(text)]


def readable_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The UTF-8 bytes that an id stands for: b"" for special ids, and for those that a model knows and its tokenizer
    does not, which published models have to round their vocabulary up."""
    return lambda token: tokenizer.token_bytes(token) if token < tokenizer.size else b""


def ending_ids(opened: OpenedModel) -> frozenset[int]:
    """Ids after which the model has no more to say: EOS, those that the model's generation_config.json names, and the
    end of a turn where the tokenizer knows one. UserError for a file that cannot be read."""
    said = read_settings(settings_file(opened.path)).get("eos_token_id")
    named = said if isinstance(said, list) else [said]
    turn = opened.tokenizer.special_tokens.get(END_OF_TURN)
    return frozenset(token for token in (opened.tokenizer.eos_id, turn, *named) if isinstance(token, int))


class ChatTemplate:
    """How a conversation is written for a model that was trained on conversations.

    Args:
        folder: of a Hugging Face tokenizer that has a template.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        # Drover's exports leave the names of special tokens in a text alone; those of a template are meant.
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False,
                                                                 split_special_tokens=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UserError(f"The tokenizer in {folder} needs Python code that lies beside it, which is not run. Its "
                            f"model can be spoken to without a chat.") from None
        self.folder = folder

    def ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids of a conversation up to where the model's answer begins, BOS included.

        messages: each with `role` and `content`. UserError where the template refuses them.
        """
        from jinja2 import TemplateError

        try:
            found = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True,
                                                        return_dict=False)
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(f"The chat template in {self.folder} does not take this conversation: {error}") from None
        return [int(token) for token in found]


def chat_template(opened: OpenedModel) -> ChatTemplate | None:
    """The template beside the model, or in its run's tokenizer stage; None where there is none, as for every model that
    was only pretrained."""
    run = run_of(opened.path)
    folder = opened.path if run is None else run.stage_folder("tokenizer") / "hf"
    return ChatTemplate(folder) if _has_template(folder) else None


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool((read_record(folder / "tokenizer_config.json", dict[str, Any]) or {}).get("chat_template"))
    except UserError:
        return False
