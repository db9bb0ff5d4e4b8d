"""One interface over sentencepiece, tiktoken, Hugging Face and byte or character tokenizers."""

from pipeline.tokenization.base import Tokenizer

__all__ = ["Tokenizer"]
