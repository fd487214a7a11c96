"""Whether a job computes the right thing: against the user's own model in plain PyTorch, and where a NaN came from."""
