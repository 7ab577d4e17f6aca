"""Write files in parallel and crash-safe; a file gets its name once it is complete."""
