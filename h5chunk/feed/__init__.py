"""torch: a map-style Dataset over any HDF5 file, and a batch sampler that groups reads by chunk."""
