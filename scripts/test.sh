#!/usr/bin/env bash
# Everything that must pass: style, types, tests. Makes its own environment; arguments go to pytest, such as
#
#   tests/cli -k info           some tests
#   -n 0                        in one process (default: two side by side)
#   --nightly                   those too that try many combinations
#   --torture                   those too that kill processes and fill disks, for minutes
#
# With the oldest versions that setup.cfg allows (H5CHUNK_OLDEST=1) the tests alone.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" test
if [ -z "$suffix" ]; then
    "$python" -m ruff check .
    "$python" -m ruff format --check .
    "$python" -m mypy
fi
"$python" -m pytest -n 2 --dist worksteal "$@"
