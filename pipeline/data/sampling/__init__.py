"""Which tokens each training step sees: a pure function of the step, and the batches that come of it."""
