"""Writing files: in parallel, crash-safe, each in its place only when it is whole."""
