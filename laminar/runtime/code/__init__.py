"""From a program to code that a rank runs: generated modules, Inductor, CUDA graphs, copies to the host."""
