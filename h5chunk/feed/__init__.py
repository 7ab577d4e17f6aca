"""PyTorch integration: map-style Dataset over any HDF5 file, batch sampler that groups reads by chunk, and loader."""
