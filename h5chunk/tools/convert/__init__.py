"""`h5chunk convert`: convert images, arrays, tables or sparse matrices to an HDF5 file, or to a folder of shards."""
