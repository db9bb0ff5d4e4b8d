"""In the job: the runner on its first node, and what it starts on all of them."""
