"""Write files in parallel and crash-safe; a file gets its name only when it is complete."""
