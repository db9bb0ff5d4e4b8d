"""Training's side of copies in an object store: checkpoints go there in the background, and come back."""
