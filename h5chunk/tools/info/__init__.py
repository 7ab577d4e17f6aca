"""`h5chunk info`: describe a file or a folder."""
