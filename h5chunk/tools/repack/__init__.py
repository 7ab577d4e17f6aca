"""`h5chunk repack`: any HDF5 file anew, with whole samples in its chunks."""
