"""Rewriting of whole files, whatever is in them."""
