"""Token shards as other programs read them: see `python -m tools.export_tokens --help`."""
