"""Programs held against one device: all ranks in one process or in real ones, rewrites and rules included."""
