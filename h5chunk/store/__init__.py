"""Files: their format, readers, and writers that never leave a half-written file under the output's name.

``format`` specifies the content of a file, ``write`` writes files and renames them once they are complete, ``read``
reads rows of any HDF5 file, ``hdf5`` validates files before they are read, ``rewrite`` rewrites any file.
"""
