"""What training reads: the token shards of a run, checked, in their order, as batches of its steps."""
