"""The user's side of a step: a model's tensors, its batches and losses; wrappers taken off, lazy layers run once."""
