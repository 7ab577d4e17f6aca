"""The file: its format, a writer that leaves no half-written file, readers.

``format`` says what is in a file, ``newfile`` makes one appear only when complete, ``fill`` has worker processes
write samples into it, ``reader`` reads rows of any HDF5 file through HDF5's chunk cache.
"""
