#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tsan.sh FOLDER NVML_FRONT SOFT: runs what works in several threads under the thread sanitizer, whose every report is
# a failure. FOLDER has front and programs, SOFT the software GPU, all built with it. There are no suppressions.
set -u
folder=$(realpath "$1") nvml=$2 soft=$3
here=$(dirname "$0")
root=$folder/soft-root output=$(mktemp)
trap 'rm -f "$output"; "$soft/softgpu" destroy "$root" > /dev/null 2>&1' EXIT
# Its memory is laid out for less randomness than some kernels have.
plain="setarch $(uname -m) -R"
$plain true 2> /dev/null || plain=
export TSAN_OPTIONS="exitcode=66 halt_on_error=0 report_signal_unsafe=0 die_after_fork=0"
failed=0

# run NAME COMMAND...
run() {
    name=$1
    shift
    $plain "$@" > "$output" 2>&1
    status=$?
    if [ $status != 0 ] || grep -q 'WARNING: ThreadSanitizer' "$output" || ! grep -q ' passed, 0 failed$' "$output"; then
        grep -v '^ok ' "$output"
        echo "not ok - $name (status $status)"
        failed=$((failed + 1))
    else
        echo "# $name: $(tail -1 "$output"), no report"
    fi
}

stub() { run "$1" "$here/inside.sh" "$folder/libcarve-cuda.so" "$nvml" "$folder/libcuda-stub.so" "$folder/libnvml-stub.so" "$folder/$2" "$3"; }
over_soft() {
    "$soft/softgpu" destroy "$root" > /dev/null 2>&1
    "$soft/softgpu" init "$root" --card a100-80 --card a30 --driver 550.90.07 > "$output" 2>&1 || cat "$output"
    run "$1" "$here/inside.sh" "$folder/libcarve-cuda.so" "$nvml" "soft:$root" - "$folder/$2" "$3"
}
stub "threads that allocate and free" share_test threads
stub "the library opened and closed by threads" process_test reopened
over_soft "threads over the software GPU" soft_test threads
over_soft "threads that launch, capture, and lose contexts" robust_test threads
over_soft "graphs, pools and blocks in threads" reserve_test threads
[ "$failed" = 0 ]
