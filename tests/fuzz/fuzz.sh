#!/usr/bin/env bash
# Builds the targets with clang and runs each for some seconds, from its corpus on; what is new goes to BUILD/found.
#
# fuzz.sh LIBTORCH BUILD SECONDS [TARGET...]
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
libtorch=$1 build=$2 seconds=$3
shift 3
[ $# -gt 0 ] || set -- $(ls "$here/corpus")
cmake -S "$here" -B "$build" -DCMAKE_CXX_COMPILER=clang++ -DBONFIRE_LIBTORCH="$libtorch" > "$build.log" || { cat "$build.log"; exit 1; }
for target in "$@"; do
  cmake --build "$build" -j "${JOBS:-2}" --target "fuzz_$target" >> "$build.log" || { cat "$build.log"; exit 1; }
  mkdir -p "$build/found/$target"
  echo "$target: $seconds s"
  (cd "$build/found" && "$build/fuzz_$target" -max_total_time="$seconds" -timeout=30 -rss_limit_mb=2048 -max_len=65536 \
    -print_final_stats=1 -verbosity=0 "$target" "$here/corpus/$target" 2>&1 | tail -n 60 | tee "$target.txt" | \
    grep -E 'SUMMARY|ERROR|Test unit|stat::(number_of_executed_units|peak)' ) || true
  found=$(find "$build/found" -maxdepth 1 -name '*-*' -newer "$build.log")
  if [ -n "$found" ]; then
    cat "$build/found/$target.txt"
    echo "$target: found $found" >&2
    exit 1
  fi
done
