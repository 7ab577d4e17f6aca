"""Pure arithmetic: how the file is laid out, in which order samples are visited, and what the cache must hold.

Nothing here opens a file, reads a clock or imports torch; all functions take integers and return frozen plans.
"""
