"""Read the data to convert: samples or sparse-matrix entries, from files and Python objects.

``kinds`` lists the kinds of sources and their options; ``open`` determines the kind of a source. The readers of samples
(``images``, ``arrays``, ``table``, ``mapping``, ``keyed``) share the base class in ``samples``; the readers of matrices
are in ``matrix``. For images, ``listing`` (with ``pairs`` for masks, or ``manifest``) lists the files, ``container``
reads their bytes, and ``decode`` decodes them.
"""
