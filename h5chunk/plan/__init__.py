"""Pure arithmetic: how the file is laid out, in which order samples are visited, what the cache must hold.

Nothing here opens a file, reads a clock or imports torch; everything takes integers and gives frozen plans.
"""
