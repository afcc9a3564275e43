#!/usr/bin/env bash
# Make the virtual environment $1 with everything in it, system packages first. Called by make;
# quick when nothing is missing.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

# What each check misses, as Debian and Ubuntu name it. The compiler and libjpeg-turbo are for the
# native decoder; they, OpenCV and the TurboJPEG library are also for ffcv, which comes as source.
missing=()
command -v "$python" >/dev/null || missing+=(python3)
command -v c++ >/dev/null || missing+=(g++)
command -v pkg-config >/dev/null || missing+=(pkg-config)
pkg-config --exists libjpeg 2>/dev/null || missing+=(libjpeg-dev)
pkg-config --exists libturbojpeg 2>/dev/null || missing+=(libturbojpeg0-dev)
pkg-config --exists opencv4 2>/dev/null || missing+=(libopencv-dev)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null || missing+=(python3-dev)

if ((${#missing[@]})); then
    # Ubuntu has one package of this name, Debian another.
    turbo() { apt-cache show libturbojpeg0-dev >/dev/null 2>&1 && echo libturbojpeg0-dev || echo libturbojpeg-dev; }
    if ! command -v apt-get >/dev/null; then
        echo "error: missing on this system: ${missing[*]} (Debian's names); install them with its package manager and run make again" >&2
        exit 2
    fi
    sudo=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || { echo "error: as root, run: apt-get install ${missing[*]}   and then make again" >&2; exit 2; }
        sudo=(sudo)
    fi
    say "installing system packages: ${missing[*]}"
    "${sudo[@]}" apt-get update -qq
    missing=("${missing[@]/libturbojpeg0-dev/$(turbo)}")
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) is too old; install Python 3.11 or newer and run: make PYTHON=python3.11" >&2
    exit 2
}

[ -x "$venv/bin/python" ] || { say "making $venv"; "$python" -m venv "$venv"; }
say "installing torch, torchvision and timm together: their default builds fit each other"
"$venv/bin/python" -m pip install --disable-pip-version-check torch torchvision timm
say "installing densefeed with what its demo and tests need"
"$venv/bin/python" -m pip install --disable-pip-version-check -e ".[dev]"
say "building ffcv 1.0.2 (optional: only the tests against stock FFCV need it)"
"$venv/bin/python" -m pip install --disable-pip-version-check -e ".[ffcv]" ||
    echo "ffcv could not be built; everything but the tests against stock FFCV works without it" >&2
say "installing NVIDIA DALI (optional: only --loader dali and its tests need it; 0.3 GB beside torch's 3 GB)"
"$venv/bin/python" -m pip install --disable-pip-version-check -e ".[dali]" ||
    echo "DALI could not be installed; everything but --loader dali and its tests works without it" >&2
