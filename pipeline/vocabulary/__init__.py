"""One interface over sentencepiece, tiktoken, Hugging Face and byte or character vocabularies."""

from pipeline.vocabulary.base import Vocabulary

__all__ = ["Vocabulary"]
