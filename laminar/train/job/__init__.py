"""Jobs: one mesh, a pipeline, or torch's own data parallel, with all they have in common; by which plan they run."""
