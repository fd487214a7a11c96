"""How many bytes a rank needs: lifetimes, allocators, buffers of exchanges, a compiler's reuse."""
