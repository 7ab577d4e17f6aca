"""The arithmetic behind `h5chunk tune`: settings to try, their memory and shuffle quality, and ratios of rates."""
