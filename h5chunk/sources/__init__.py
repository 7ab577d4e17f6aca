"""Sources of data: read samples, or the entries of matrices, from files and Python objects.

``kinds`` lists the kinds of data and their options, ``open`` finds out which a source is. The kinds of samples
(``images``, ``arrays``, ``table``, ``mapping``) share ``samples``; those of matrices are in ``matrix``. Of images,
``listing`` says which there are (or ``manifest``), ``container`` gets their bytes, and ``decode`` makes pixels of them.
"""
