"""`h5chunk bench`: measure how fast this machine feeds a file, stage by stage."""
