"""One interface over sentencepiece, tiktoken, Hugging Face and byte or character tokenizers."""
