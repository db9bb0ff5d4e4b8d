"""The typed configuration tree: one file per section, strict loading, advice in every field."""
