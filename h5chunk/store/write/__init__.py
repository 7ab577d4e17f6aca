"""Write files in parallel and crash-safe; a file is renamed to its name once it is complete."""
