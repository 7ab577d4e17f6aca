"""The file: its format, writers under whose output's name no half-written file ever stands, and readers.

``format`` specifies what is in a file, ``write`` makes one appear under its name only when it is complete, ``read``
reads rows of any HDF5 file, ``guard`` validates files before they are read, ``rewrite`` writes any file anew.
"""
