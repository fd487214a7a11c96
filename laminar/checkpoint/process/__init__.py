"""The writer process: hashes and writes blocks out of shared memory while training goes on."""
