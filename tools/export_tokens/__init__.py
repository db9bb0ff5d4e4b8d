"""Token shards as other programs read them: see `python -m drover.tools.export_tokens --help`."""
