"""Drover: raw text to a pretrained, evaluated Llama 3 decoder in Hugging Face form, in one restartable chain.

The folders next to this file are links to those at the top of the repository. An installed package, and the copy of the
code that Slurm jobs run, contain the files themselves. So all code is imported as `drover.*`, wherever it lies.
"""
