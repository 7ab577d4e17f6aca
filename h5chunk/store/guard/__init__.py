"""What keeps bad files out and finds bad chunks."""
