"""How a model is spread over ranks: the rank grid, FSDP2, activation checkpointing."""
