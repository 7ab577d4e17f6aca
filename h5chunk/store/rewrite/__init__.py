"""Rewrite whole files, whatever they contain."""
