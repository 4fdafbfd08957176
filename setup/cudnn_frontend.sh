#!/usr/bin/env bash
# Prints the folder of the headers of cuDNN's frontend 1.18.0, fetching them on first use (2 MB). CMake asks for them where
# the CUDA plug-in is built.
#
# BONFIRE_CACHE=DIR moves the cache (default: ~/.cache/bonfire), which all clones share.
set -euo pipefail

version=1.18.0
. "$(dirname "${BASH_SOURCE[0]}")/cache.sh"
home=$cache/cudnn-frontend-$version
[ -f "$home/complete" ] || lock
if [ ! -f "$home/complete" ]; then
  begin_part
  fetch --retries 1 --implementation cp --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 \
    "nvidia-cudnn-frontend==$version"
  unpack
  mkdir "$part/home"
  mv "$part/wheels/include" "$part/home/"
  touch "$part/home/complete"
  rm -rf "$home"
  mv -T "$part/home" "$home"
fi
echo "$home/include"
