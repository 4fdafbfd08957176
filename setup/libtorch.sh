#!/usr/bin/env bash
# Prints the folder of LibTorch 2.11.0 (with include/ and lib/), fetching it on first use.
#
# LIBTORCH=DIR names an existing LibTorch, or a Python torch package, instead.
# BONFIRE_CACHE=DIR moves the cache (default: ~/.cache/bonfire), which all clones share.
set -euo pipefail

version=2.11.0
if [ -n "${LIBTORCH:-}" ]; then
  [ -f "$LIBTORCH/include/torch/headeronly/version.h" ] || { echo "LIBTORCH=$LIBTORCH has no include/torch/version.h" >&2; exit 2; }
  echo "$LIBTORCH"
  exit 0
fi

cache=${BONFIRE_CACHE:-$HOME/.cache/bonfire}
home=$cache/libtorch-$version
if [ ! -f "$home/complete" ]; then
  # Unpacked beside its final place and renamed, so a clone never sees half of it.
  mkdir -p "$cache"
  part=$(mktemp -d "$cache/part.XXXXXX")
  trap 'rm -rf "$part"' EXIT
  echo "fetching LibTorch $version into $home (530 MB, once)" >&2
  fetch() { python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$part" "$@" >&2; }
  # No CPU-only wheel is on PyPI; the CPU library of this one needs the CUDA runtime and CUPTI beside it.
  fetch --python-version 312 --implementation cp --platform manylinux_2_28_x86_64 "torch==$version"
  fetch --python-version 312 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 nvidia-cuda-runtime==13.0.96
  fetch --python-version 312 --platform manylinux_2_25_x86_64 nvidia-cuda-cupti==13.0.85
  mkdir "$part/wheels" && for wheel in "$part"/*.whl; do unzip -q "$wheel" -d "$part/wheels"; done
  mkdir "$part/home"
  mv "$part/wheels/torch/include" "$part/wheels/torch/lib" "$part/home/"
  find "$part/wheels/nvidia" -name 'libcudart.so.13' -exec cp {} "$part/home/lib/" \;
  find "$part/wheels/nvidia" -name 'libcupti.so.13' -exec cp {} "$part/home/lib/" \;
  touch "$part/home/complete"
  rm -rf "$home"
  mv "$part/home" "$home" 2>/dev/null || [ -f "$home/complete" ]
fi
echo "$home"
