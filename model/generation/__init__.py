"""Text generation: several prompts at once, each with its own settings, streamed.

    sampling.py    Sampling, the settings of one text; how logits become a token
    stream.py      stream(): texts of several prompts, piece by piece; generate(): the tokens of one prompt after the
                   other, also by models that are split over ranks
"""
