"""Pure arithmetic, without files: the layout of chunks, the order of an epoch, and the settings of caches."""
