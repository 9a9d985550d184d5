#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh CUDA_FRONT NVML_FRONT FOLDER SECONDS: runs the test programs of a build folder and adds up what they say.
# The last line is "N passed, M failed".
set -u
cuda_front=$1 nvml_front=$2 folder=$3 seconds=$4
here=$(dirname "$0")
passed=0 failed=0 output=$(mktemp)
trap 'rm -f "$output"' EXIT

# run NAME COMMAND...: shows what went wrong, and all of it if the program didn't come to its last line.
run() {
    name=$1
    shift
    "$@" > "$output" 2>&1
    status=$?
    sum=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$output" | tail -1)
    if [ -z "$sum" ]; then
        cat "$output"
        echo "not ok - $name came to no end (status $status)"
        failed=$((failed + 1))
        return
    fi
    passed=$((passed + ${sum% *}))
    failed=$((failed + ${sum#* }))
    if [ "$status" != 0 ]; then
        grep -v '^ok ' "$output"
        [ "${sum#* }" != 0 ] || failed=$((failed + 1))
    fi
    echo "# $name: ${sum% *} passed, ${sum#* } failed"
}

inside() {
    front=$1
    shift
    "$here/inside.sh" "$front" "$nvml_front" "$folder/libcuda-stub.so" "$folder/libnvml-stub.so" "$@"
}

run "tables of blocks and pages" "$folder/pointers_test"
run "share" inside "$cuda_front" "$folder/share_test"
run "loader" inside "$cuda_front" "$folder/loader_test" "$(realpath "$folder/linked")"
run "usage file" inside "$cuda_front" "$folder/usage_test"
run "NVML" inside "$cuda_front" "$folder/nvml_test"
run "interleavings" inside "$folder/libcarve-cuda-steps.so" "$folder/puppet_test"
run "races" inside "$folder/libcarve-cuda-steps.so" "$folder/race_test" "$seconds"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
