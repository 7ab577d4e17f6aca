"""Measure the rates of batches, of the machine, of the disk, and of the stages in between."""
