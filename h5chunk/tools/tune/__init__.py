"""`h5chunk tune`: find the best settings by measuring them."""
