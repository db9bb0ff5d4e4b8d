"""What TensorBoard has stored, read back."""


def board_points(folder, tag):
    """A TensorBoard curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    board = EventAccumulator(str(folder))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]
