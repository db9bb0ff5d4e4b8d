"""Tokenizers: trained or taken over, converted once to the one that is exported, which every stage runs."""
