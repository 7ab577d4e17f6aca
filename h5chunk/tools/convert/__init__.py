"""`h5chunk convert`: convert images or a sparse matrix to a file, or to a folder of shards."""
