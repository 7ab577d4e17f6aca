"""Read objects of S3, Google Cloud Storage, Azure and web servers through sparse local copies.

A separate process makes the range requests (`h5chunk.remote.server`), so that they are independent of forks of the
training process and of its GIL. It writes the received bytes to a sparse local file, which all other code reads.
"""
