"""PyTorch integration: a map-style Dataset over HDF5 files, a batch sampler that groups reads by chunk, a loader."""
