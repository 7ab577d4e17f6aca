"""Sources of data: read samples, or the entries of matrices, from files and Python objects.

``listing`` says which samples there are (in a folder, an archive or a manifest), ``container`` gets their bytes,
``decode`` turns bytes into pixels, ``images`` puts the three together.
"""
