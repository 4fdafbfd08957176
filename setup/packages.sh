#!/usr/bin/env bash
# Installs the Debian/Ubuntu packages that the given parts need. Does nothing where all are there.
#
# packages.sh [build] [tests] [bench] [lint] [fuzz]: without a word, build and tests
set -euo pipefail

build=(g++ cmake ninja-build ccache mold unzip python3 python3-pip ca-certificates
       libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libxxhash-dev
       libgloo-dev libsentencepiece-dev libpcre2-dev libutf8proc-dev)
tests=(libgtest-dev procps openmpi-bin libopenmpi-dev mpich slurm-wlm munge)
bench=(libbenchmark-dev)
lint=(clang-format clang-tidy)
fuzz=(clang libclang-rt-dev)

[ $# -gt 0 ] || set -- build tests
wanted=()
for part in "$@"; do
  case $part in
    build) wanted+=("${build[@]}") ;;
    tests) wanted+=("${tests[@]}") ;;
    bench) wanted+=("${bench[@]}") ;;
    lint) wanted+=("${lint[@]}") ;;
    fuzz) wanted+=("${fuzz[@]}") ;;
    *) echo "packages.sh: no part '$part'; there are build, tests, bench, lint and fuzz" >&2; exit 2 ;;
  esac
done

missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "installing ${#missing[@]} packages: ${missing[*]}"
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
