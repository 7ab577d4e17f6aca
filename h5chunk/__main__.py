"""``python -m h5chunk`` is the command line."""

from __future__ import annotations

from h5chunk.cli import main

if __name__ == "__main__":
    main(prog_name="h5chunk")
