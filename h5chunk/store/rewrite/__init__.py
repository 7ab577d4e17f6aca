"""Rewrite complete HDF5 files, whatever they contain."""
