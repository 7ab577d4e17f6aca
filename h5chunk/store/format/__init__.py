"""The specification of h5chunk files, their header, and the stored recommendation."""
