"""PyTorch integration: a map-style Dataset of HDF5 files, a batch sampler that groups reads by chunk, and a loader."""
