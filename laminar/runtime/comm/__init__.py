"""How ranks exchange tensors: shared memory, sends and receives, process groups; and between sets of ranks."""
