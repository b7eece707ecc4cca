#!/usr/bin/env bash
# Install the Debian packages that the Python packages need and do not bring, if any is missing.
# Does nothing where apt is missing, and only names them where the user is not root.
set -euo pipefail

packages=()

# need PACKAGE CHECK...: add PACKAGE unless CHECK succeeds. Checks look for the thing itself, not for dpkg's record, so
# that an own Python or compiler counts.
need() {
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || packages+=("$package")
}

has_library() { /sbin/ldconfig -p | grep -q "$1"; }

python=${1:-python3}
need python3-venv "$python" -c 'import ensurepip, venv' # Debian ships these apart from Python
need g++ command -v g++ # compiles page selection at first use; without it the torch code runs, more slowly
if [[ -e /dev/nvidiactl ]]; then
    need libnuma1 has_library libnuma.so.1 # linked by SGLang's CUDA kernels, which only a GPU host loads
    # Triton builds its launchers, and FlashInfer its kernels, at run time.
    need gcc command -v gcc
    need python3-dev "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")'
fi

if ((${#packages[@]} == 0)); then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "Missing here (Debian names): ${packages[*]}. Install them with your package manager if a step below fails." >&2
    exit 0
fi
if ((EUID != 0)); then
    echo "Missing Debian packages: run 'sudo apt-get install ${packages[*]}' if a step below fails." >&2
    exit 0
fi
echo "Installing Debian packages: ${packages[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# A failed update is not fatal: one broken list among several does not keep these packages from being found.
apt-get update -qq >"$log" 2>&1 || echo "apt-get update reported errors; going on with the lists at hand" >&2
if ! apt-get install -y -qq --no-install-recommends "${packages[@]}" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    echo "Could not install: ${packages[*]}" >&2
    exit 1
fi
