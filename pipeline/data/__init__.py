"""Documents: where they come from, how text and token shards are laid out, in which order they train."""
