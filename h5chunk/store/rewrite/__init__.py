"""Writing a whole file anew, of whatever is in it."""
