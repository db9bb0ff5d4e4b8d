"""Export token shards to formats of other programs: see `drover export-tokens --help`."""
