"""Specify, validate, read, write and rewrite HDF5 files."""
