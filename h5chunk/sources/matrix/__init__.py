"""Readers of sparse matrices: each yields blocks of (row, column, value) in bounded memory.

``block`` says what a source is and opens one; the other modules read one format each.
"""
