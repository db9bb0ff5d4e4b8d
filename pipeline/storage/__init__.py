"""Objects and files by URL, and mirrors of what a run made: each file checked by hash, the list of them put last."""
