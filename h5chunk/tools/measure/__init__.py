"""Measuring, for `h5chunk tune` and `h5chunk bench`."""
