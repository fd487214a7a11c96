"""Where checkpoints lie: local disks, memory and object stores behind one protocol."""
