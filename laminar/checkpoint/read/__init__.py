"""Checkpoints read: parts of tensors, verified before anyone sees them; what is damaged; what differs."""
