"""`h5chunk append`: more samples behind those of a file."""
