# Sourced by demo.sh and test.sh: makes a virtual environment once and installs this project into it.
#
#   $1                  extras to install, or nothing
#   H5CHUNK_VENV        where (default: .venv in the project, or .venv-oldest)
#   H5CHUNK_USE_TORCH   1: use the torch that the system's Python has, such as one built for its GPU
#   H5CHUNK_TORCH_FROM  an environment whose torch is linked into this one, which saves installing it again
#   H5CHUNK_OLDEST      1: install the oldest versions that setup.cfg allows, rather than current ones
#   PYTHON              which Python makes it (default: python3)
#
# Leaves: $root, $python, and $suffix, which is empty where versions are current.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
suffix=
if [ "${H5CHUNK_OLDEST:-0}" = 1 ]; then suffix=-oldest; fi
venv=${H5CHUNK_VENV:-$root/.venv$suffix}
system_python=${PYTHON:-python3}
extras=${1:-}

"$system_python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "h5chunk needs Python 3.10 or newer; $system_python is $("$system_python" -V). Set PYTHON to another." >&2
    exit 1
}
if [ ! -x "$venv/bin/python" ]; then
    share=()
    if [ "${H5CHUNK_USE_TORCH:-0}" = 1 ] && "$system_python" -c 'import torch' 2>/dev/null; then
        share=(--system-site-packages)
    fi
    echo "making the environment $venv"
    "$system_python" -m venv "${share[@]}" "$venv"
    if [ -n "${H5CHUNK_TORCH_FROM:-}" ]; then
        cp -al "$H5CHUNK_TORCH_FROM"/lib/python3*/site-packages/{torch,torch-*,torchgen,functorch} \
            "$venv"/lib/python3*/site-packages/
    fi
fi
python=$venv/bin/python
stamp=$venv/.installed-$(cat "$root/setup.cfg" "$root/pyproject.toml" | sha256sum | cut -c1-16)-${extras:-plain}$suffix
if [ ! -e "$stamp" ]; then
    echo "installing (a few minutes the first time)"
    "$python" -c 'import torch' 2>/dev/null || "$python" -m pip install -q --no-warn-script-location torch==2.13.0
    "$python" "$root/scripts/oldest.py" >"$venv/oldest.txt"
    "$python" -m pip install -q --no-warn-script-location ${suffix:+-c "$venv/oldest.txt"} -e "$root${extras:+[$extras]}"
    touch "$stamp"
fi
cd "$root"
