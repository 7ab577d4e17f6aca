"""Write files in parallel and crash-safe. A file gets its name once it is complete."""
