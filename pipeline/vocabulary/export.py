"""A vocabulary as a Hugging Face tokenizer folder with the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.files import write_json, write_text
from pipeline.vocabulary.base import PAD, Vocabulary


def write_hugging_face(vocabulary: Vocabulary, folder: Path) -> list[Path]:
    """Write `tokenizer.json` and `tokenizer_config.json` for `transformers.AutoTokenizer`; returns their paths.

    As with Llama 3, BOS is put before a text by default (`add_special_tokens=True`) and EOS is not put after it.
    Special tokens are not matched inside a text (`split_special_tokens`), as everywhere in Drover; who builds chat
    prompts by text switches that off.
    """
    tokenizer = hugging_face_tokenizer(vocabulary)
    bos, eos = vocabulary.bounds
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos,
                "clean_up_tokenization_spaces": False, "split_special_tokens": True}
    if PAD in vocabulary.special_tokens:
        settings["pad_token"] = PAD
    paths = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    write_text(paths[0], tokenizer.to_str(pretty=True))
    write_json(paths[1], settings)
    return paths


def hugging_face_tokenizer(vocabulary: Vocabulary) -> Any:
    """A `tokenizers.Tokenizer` that gives the vocabulary's ids, with BOS before the text by default."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    tokenizer = vocabulary.hugging_face()
    by_id = sorted(vocabulary.special_tokens.items(), key=lambda item: item[1])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name, _ in by_id])
    bos, _ = vocabulary.bounds
    tokenizer.post_processor = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"],
                                                  special_tokens=[(bos, vocabulary.bos_id)])
    return tokenizer
