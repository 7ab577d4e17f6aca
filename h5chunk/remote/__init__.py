"""Read objects of S3, Google Cloud Storage, Azure and web servers through sparse local copies.

A separate process makes the range requests (`h5chunk.remote.server`), so that forks of the training process and its GIL
do not disturb them. It writes the received bytes to a sparse local file, which all other code reads.
"""
