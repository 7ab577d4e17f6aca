"""`h5chunk convert`: images or a sparse matrix into a file, or a folder of shards."""
