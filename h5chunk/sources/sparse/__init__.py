"""Sparse matrices that can be packed: each source gives blocks of (row, column, value) in bounded memory.

``block`` says what a source is and opens one; the other modules read one format each.
"""
