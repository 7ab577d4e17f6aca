"""Opening, validating and decoding of HDF5 files."""
