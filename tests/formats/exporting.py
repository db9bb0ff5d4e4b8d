"""A model in memory as a folder in Hugging Face's form."""


from pipeline.formats.huggingface import stream_folder


def write_model(folder, model, **options):
    """`stream_folder` for weights that lie in memory."""
    write_state(folder, model.state_dict(), model.config, **options)


def write_state(folder, state, config, **options):
    """The same for a mapping of tensors by name."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    stream_folder(folder, shapes, state.__getitem__, config, **options)
