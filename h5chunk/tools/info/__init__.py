"""`h5chunk info`: describe a file, several files, or the machine."""
