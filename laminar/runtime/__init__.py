"""Programs run: exchanged, recorded, compiled, in stages, and held against one device."""
