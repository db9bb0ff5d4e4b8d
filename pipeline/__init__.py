"""The stages of a Drover run, from raw text to a report, and what they are made of."""
