"""Readers of sparse matrices: each yields blocks of (row, column, value) in bounded memory.

``block`` says what a source is. ``text`` is shared by formats in text, ``compressed`` by those of compressed rows or
columns, and ``hdf5`` by those in HDF5; the other modules read one format each.
"""
