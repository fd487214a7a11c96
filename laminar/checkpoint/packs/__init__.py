"""Files that hold many blocks each, with an index at their end: written, found again, read."""
