#!/usr/bin/env bash
# Prints the folder of LibTorch 2.11.0 (with include/ and lib/), fetching it on first use.
#
# LIBTORCH=DIR names an existing LibTorch, or a Python torch package, instead.
# BONFIRE_CACHE=DIR moves the cache (default: ~/.cache/bonfire), which all clones share.
# Where there is an NVIDIA driver, or with WITH_CUDA=1, CUDA's own libraries are fetched as well.
set -euo pipefail

version=2.11.0
if [ -n "${LIBTORCH:-}" ]; then
  [ -f "$LIBTORCH/include/torch/headeronly/version.h" ] ||
    { echo "LIBTORCH=$LIBTORCH has no include/torch/headeronly/version.h: it is no LibTorch $version" >&2; exit 2; }
  echo "$LIBTORCH"
  exit 0
fi

. "$(dirname "${BASH_SOURCE[0]}")/cache.sh"
home=$cache/libtorch-$version

[ -f "$home/complete" ] || lock
if [ ! -f "$home/complete" ]; then
  begin_part
  echo "fetching LibTorch $version into $home (530 MB, once)" >&2
  # No CPU-only wheel is on PyPI; the CPU library of this one needs the CUDA runtime and CUPTI beside it.
  fetch --implementation cp --platform manylinux_2_28_x86_64 "torch==$version"
  fetch --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 nvidia-cuda-runtime==13.0.96
  fetch --platform manylinux_2_25_x86_64 nvidia-cuda-cupti==13.0.85
  unpack
  mkdir "$part/home"
  mv "$part/wheels/torch/include" "$part/wheels/torch/lib" "$part/home/"
  find "$part/wheels/nvidia" -name 'libcudart.so.13' -exec cp {} "$part/home/lib/" \;
  find "$part/wheels/nvidia" -name 'libcupti.so.13' -exec cp {} "$part/home/lib/" \;
  touch "$part/home/complete"
  rm -rf "$home"
  mv -T "$part/home" "$home"
  rm -rf "$part"
fi

# libtorch_cuda.so looks for CUDA's libraries in ../../nvidia, seen from its own folder.
nvidia=$cache/nvidia
wants_cuda() { [ -e /proc/driver/nvidia/version ] || [ "${WITH_CUDA:-}" = 1 ]; }
if [ ! -f "$nvidia/complete" ] && wants_cuda; then lock; fi
if [ ! -f "$nvidia/complete" ] && wants_cuda; then
  begin_part
  echo "fetching CUDA's libraries into $nvidia (1.4 GB, once)" >&2
  platforms=(--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_18_x86_64
             --platform manylinux_2_25_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64)
  if fetch "${platforms[@]}" nvidia-cublas==13.1.0.3 nvidia-cuda-cupti==13.0.85 nvidia-cuda-nvrtc==13.0.88 \
       nvidia-cuda-runtime==13.0.96 nvidia-cudnn-cu13==9.19.0.56 nvidia-cufft==12.0.0.61 nvidia-cufile==1.15.1.6 \
       nvidia-curand==10.4.0.35 nvidia-cusolver==12.0.4.66 nvidia-cusparse==12.6.3.3 nvidia-cusparselt-cu13==0.8.0 \
       nvidia-nccl-cu13==2.28.9 nvidia-nvjitlink==13.0.88 nvidia-nvshmem-cu13==3.4.5 nvidia-nvtx==13.0.85; then
    unpack
    touch "$part/wheels/nvidia/complete"
    rm -rf "$nvidia"
    mv -T "$part/wheels/nvidia" "$nvidia"
  else
    echo "CUDA's libraries could not be fetched: the GPU will not be used, unless LIBTORCH names a Python torch that has them" >&2
  fi
fi
echo "$home"
