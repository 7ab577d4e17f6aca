"""`h5chunk verify`: structure and checksums of a file or a folder; repair."""
