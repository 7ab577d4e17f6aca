"""`h5chunk verify`: check the structure and checksums of files, and repair them."""
