"""All ranks in one process: line by line, or by the very code that ranks run."""
