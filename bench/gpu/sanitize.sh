#!/bin/bash
# Runs the tests of CUDA kernels under NVIDIA's compute-sanitizer, many at a time on one GPU, and ends with a summary.
#   bench/gpu/sanitize.sh [BUILD] [SECONDS] [TOOL...]     default: build 480 memcheck racecheck synccheck
# Only kernels of Bonfire count: those of cuBLASLt have hazards of their own. What has not ended when the time is over is listed
# as not run. Logs lie in BUILD/sanitize. Exit code 1 where something was found or did not run.
set -uf
build=${1:-build}; seconds=${2:-480}; shift $(( $# < 2 ? $# : 2 ))
tools=${*:-memcheck racecheck synccheck}
jobs=${JOBS:-16}
logs=$build/sanitize
rm -rf "$logs"; mkdir -p "$logs"
command -v compute-sanitizer > /dev/null || PATH=$PATH:/usr/local/cuda/bin
export OMP_NUM_THREADS=1 CUDA_MODULE_LOADING=LAZY
end=$(( $(date +%s) + seconds )); export end logs build

# One process a test with all of its parameters, the longest first. Those that repeat themselves say nothing more here.
tests=$("$build/test_cuda" --gtest_list_tests --gtest_filter="${FILTER:-*GpuKernels.*:*GpuFusedProducts.*:*GpuActivatedProducts.*:GpuFp8.*:GpuOptimizer.*:*GpuSharedMemory.*:GpuShares.*:-*Thousand*:*EveryLength*}" \
  | awk '/^[^ ]/ { suite = $1 } /^ / { print suite $1 }' | sed 's#/[^/]*$#/*#' | sort -ru)

one() {
  tool=$1; test=$2; log=$logs/$tool.${test//[\/*]/_}.log; left=$(( end - $(date +%s) ))
  if [ $left -lt 10 ]; then echo "NOT RUN   $tool $test"; return; fi
  begin=$(date +%s)
  # racecheck breaks cuBLASLt's kernels where it is told to leave them alone: it looks at all, and theirs are left out here.
  only="--kernel-name kns=_ZN7bonfire"; [ "$tool" = racecheck ] && only=
  timeout --signal=KILL $left compute-sanitizer --tool "$tool" $only --error-exitcode 99 --print-limit 1000 \
    "$build/test_cuda" --gtest_filter="$test" > "$log" 2>&1
  code=$?; took=$(( $(date +%s) - begin ))
  if [ $code = 99 ] && [ "$tool" = racecheck ] && ! grep -q 'Race reported.*bonfire::\|Internal Sanitizer\|FAILED' "$log"; then
    echo "clean     $tool $test ${took}s (others' kernels: $(grep -c 'Race reported' "$log") hazards)"; return
  fi
  case $code in
    0) grep -q 'ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards' "$log" && echo "clean     $tool $test ${took}s" \
         || echo "NO WORD   $tool $test ${took}s: $(grep -m1 -i 'error\|warning' "$log")" ;;
    99) echo "FOUND     $tool $test ${took}s: $(grep -m1 'SUMMARY' "$log") $(grep -m1 '========= *\(Error\|Warning\|Invalid\|Barrier\|Divergent\|Race\)' "$log")" ;;
    124|137) echo "NOT RUN   $tool $test: the time was over after ${took}s" ;;
    *) echo "FAILED    $tool $test ${took}s: exit code $code, $(grep -m1 'FAILED\|Failure\|rror' "$log")" ;;
  esac
}
export -f one
# All tools of a test before the next one, so that what is left at the end is whole tests.
for test in $tests; do for tool in $tools; do printf '%s %s\n' "$tool" "$test"; done; done \
  | xargs -P "$jobs" -L 1 bash -c 'one "$0" "$1"' | tee "$logs/summary"
echo
grep -v '^clean' "$logs/summary" | sort
awk '{ count[$1]++ } END { for (word in count) printf "%s: %d  ", word, count[word]; print "" }' "$logs/summary"
! grep -qv '^clean' "$logs/summary"
