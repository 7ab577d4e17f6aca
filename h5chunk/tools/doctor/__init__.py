"""Watch a PyTorch training loop, find what slows it down, and predict what a change would gain."""
