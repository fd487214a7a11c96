"""Plans with stages: where to cut, what may be cut, and what each stage keeps of a plan for the whole graph."""
