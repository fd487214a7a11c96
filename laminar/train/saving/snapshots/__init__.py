"""A rank's part of a checkpoint: which blocks it writes, copied out of what it trains with, handed to a writer."""
