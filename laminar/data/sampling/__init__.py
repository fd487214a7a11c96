"""The order of an epoch, and each rank's part of every step of it: samplers, loaders, streams, their state."""
