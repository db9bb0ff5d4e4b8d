"""Token shards in an object store: copied there by encode, read from there by training."""
