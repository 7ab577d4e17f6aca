"""Run the command line: ``python -m h5chunk``."""

from __future__ import annotations

from h5chunk.cli import main

if __name__ == "__main__":
    main(prog_name="h5chunk")
