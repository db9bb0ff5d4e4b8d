"""Export token shards to formats of other programs: see `python -m drover.tools.export_tokens --help`."""
