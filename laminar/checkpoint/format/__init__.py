"""What is in a checkpoint: tensors cut into blocks, hashes, the state and its root, the manifest, encodings."""
