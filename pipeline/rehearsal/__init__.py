"""A training step without its machines: one rank of any number, with tensors that have shapes and no contents."""
