"""The commands on whole files: convert, append, info, tune, repack, verify and bench. They return reports."""
