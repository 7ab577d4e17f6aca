"""`h5chunk repack`: rewrite an HDF5 file with whole samples in its chunks."""
