"""`h5chunk tune`: find the best settings with a model and measurements."""
