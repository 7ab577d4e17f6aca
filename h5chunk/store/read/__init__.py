"""Reading files: what is in them, and rows of it, through HDF5 and by byte ranges."""
