"""`h5chunk bench`: what this machine gives for a file, stage by stage."""
