"""Text generation: several prompts at once, each with its own settings, streamed.

    sampling.py    Sampling, the settings of one text; how logits become a token
    cache.py       RowCaches: keys and values of sequences of unequal length
    text.py        TextStream: tokens to text that never has to be changed afterwards
    stream.py      stream(): texts from prompts, piece by piece

`drover.model.generate.generate` continues one prompt after the other, also on models that are split over ranks.
"""
