"""Open, validate and decode HDF5 files."""
