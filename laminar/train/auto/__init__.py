"""`plan="auto"`: a plan searched by one rank for all, its finalists tried out where the job will run."""
