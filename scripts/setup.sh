#!/bin/sh
# setup.sh VENV WHAT: makes the virtual environment VENV and installs WHAT (.[service] or .[dev]) into it,
# at the versions of requirements.lock.
set -eu
venv=$1
what=$2
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Python 3.11 or newer is needed; '$python' is $("$python" --version 2>&1). Try: make PYTHON=python3.12 ..." >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

torch=$(sed -n 's/^torch==//p' requirements.lock)
has_torch() { "$venv/bin/python" -c "from importlib.metadata import version as v; import sys; sys.exit(v('torch').split('+')[0] != '$torch')" 2>/dev/null; }
cpu_index=https://download.pytorch.org/whl/cpu

# The registry's torch for Linux brings gigabytes of CUDA. Without an NVIDIA device that is a waste,
# so take PyTorch's own CPU build when its index answers quickly; else whatever pip finds.
if ! has_torch && [ "$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ] &&
    "$python" - "$cpu_index/torch/" 2>/dev/null <<'PY'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=3).close()
PY
then
    echo "No NVIDIA device: installing the CPU build of torch $torch"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --index-url "$cpu_index" "torch==$torch" ||
        echo "That did not work; falling back to the package index" >&2
fi
echo "Installing $what into $venv (the first time takes a minute or two)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c requirements.lock -e "$what"
