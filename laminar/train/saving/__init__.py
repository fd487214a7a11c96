"""A job's state on disk: checkpoints written beside the steps or between them, and loaded, with users' schedulers."""
