"""`h5chunk tune`: settings found by a model and by measurement."""
