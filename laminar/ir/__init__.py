"""Values: tensors, meshes, placements, graphs, plans, programs, nets, timelines, clusters. Plain data, no torch."""
