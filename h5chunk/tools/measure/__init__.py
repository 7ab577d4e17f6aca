"""Measure rates: of batches, of the machine, of the disk, and of the stages between them."""
