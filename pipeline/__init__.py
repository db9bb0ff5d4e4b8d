"""The stages of a Drover run, from raw text to a report, and what they are made of."""

if __name__ != "drover.pipeline":
    raise ImportError("Drover's pipeline is imported as drover.pipeline: as pipeline it would be a second copy.")
