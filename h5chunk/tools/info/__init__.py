"""`h5chunk info`: what is in a file or a folder."""
