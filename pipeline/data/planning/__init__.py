"""What becomes of every staged document, decided in bounded passes: duplicates, splits, shards."""
