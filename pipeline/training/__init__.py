"""What the training loop is made of: engine, optimizer, schedule, checkpoints, metrics."""
