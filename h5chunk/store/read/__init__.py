"""Read fields and rows, through HDF5 and by byte ranges."""
