"""Optimizers: how this rank's parts of the weights are updated, behind one interface."""
