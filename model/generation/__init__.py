"""Continuing texts: several at once, each with settings of its own, given out as they come.

    sampling.py    Sampling, the settings of one text; how scores become a token
    scores.py      TokenScore: what the model itself says of a token, where that is asked for
    cache.py       RowCaches: keys and values of sequences of unequal length
    batch.py       Batch: one more token for each of several sequences, in one forward pass
    text.py        TextStream: tokens to text of which nothing will have to be taken back
    writer.py      Writer and stream(): texts from prompts, piece by piece

`drover.model.generate.generate` continues one prompt after the other instead, on models that are split over ranks too.
"""
