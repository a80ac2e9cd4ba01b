#!/usr/bin/env bash
# tools/system.sh: what the tests use of the system, installed where that can be done unasked (root, apt-get); else a line says what is skipped.
set -uo pipefail
wanted=()
# PoCL makes the processor an OpenCL device; Chromium opens the report page.
ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1 || wanted+=(pocl-opencl-icd)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || [ -z "${CI:-}" ] || wanted+=(chromium)
[ ${#wanted[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing ${wanted[*]}"
  apt-get install -y -q "${wanted[@]}" >/dev/null 2>&1 || { apt-get update -q >/dev/null 2>&1 && apt-get install -y -q "${wanted[@]}" >/dev/null 2>&1; } && exit 0
fi
echo "Without ${wanted[*]} the tests that need it are skipped (Debian: apt-get install ${wanted[*]})"
