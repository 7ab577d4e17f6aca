"""What users do with whole files: convert, info. Looks at all rooms; draws and prints nothing."""
