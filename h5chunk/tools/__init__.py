"""The commands on whole files, as functions that return reports: convert, append, info, tune, repack, verify, bench."""
