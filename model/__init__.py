"""The Llama network. Importing this package, or `model.config`, does not import torch."""
