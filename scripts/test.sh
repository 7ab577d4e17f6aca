#!/usr/bin/env bash
# Everything that must pass: style, types, tests. Makes its own environment; arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" test
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" -m pytest "$@"
