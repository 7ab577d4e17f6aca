"""Read objects of S3, Google Cloud Storage, Azure and web servers through sparse local copies.

A process of its own makes the range requests (`h5chunk.remote.server`), so that neither forks nor Python's lock in the
training process get in their way. It writes what comes to a sparse local file; all other code reads that file.
"""
