"""Readers of sparse matrices, which yield blocks of (row, column, value) entries in bounded memory.

``block`` defines the interface of a source. Text formats share ``text``, formats with compressed rows or columns share
``compressed``, and HDF5 formats share ``hdf5``; the other modules read one format each.
"""
