#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh CUDA_FRONT NVML_FRONT FOLDER SECONDS SOFT TWIN: runs the test programs of a build folder and adds up what they
# say. SOFT is the build folder of the software GPU, TWIN the program that makes twins. The last line is
# "N passed, M failed".
set -u
cuda_front=$1 nvml_front=$2 folder=$3 seconds=$4 soft=$5 twin=$6
here=$(dirname "$0")
passed=0 failed=0 output=$(mktemp)
root=$folder/soft-root
trap 'rm -f "$output"; "$soft/softgpu" destroy "$root" > /dev/null 2>&1' EXIT

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

# twins CUDA NVML: makes twins of the fronts for a driver's two libraries. Containers get those; a front as it was
# built is what they get of a driver whose files can't be read.
twins() {
    if ! { "$twin" -front "$cuda_front" -driver "$1" -o "$folder/twin-cuda.so" &&
        "$twin" -front "$nvml_front" -driver "$2" -o "$folder/twin-nvml.so"; } > "$output" 2>&1; then
        cat "$output"
        echo "not ok - no twins of $1 and $2"
        failed=$((failed + 1))
    fi
}
twins "$folder/libcuda-stub.so" "$folder/libnvml-stub.so"
plain_cuda=$cuda_front plain_nvml=$nvml_front

run "tables of blocks and pages" "$folder/pointers_test"
run "oracle" "$folder/oracle_test" "$here/not_hooked.tbl" "$here/../../soft/tables/cuda_exports.tbl"
run "loader, front as built" inside "$plain_cuda" "$folder/loader_test" "$(realpath "$folder/linked")"
run "NVML, front as built" inside "$plain_cuda" "$folder/nvml_test"
cuda_front=$folder/twin-cuda.so nvml_front=$folder/twin-nvml.so
run "credit" "$folder/credit_test"
run "throttle" "$folder/throttle_test"
run "share" inside "$cuda_front" "$folder/share_test"
run "loader" inside "$cuda_front" env TWIN=1 "$folder/loader_test" "$(realpath "$folder/linked")"
run "usage file" inside "$cuda_front" "$folder/usage_test"
run "NVML" inside "$cuda_front" env TWIN=1 "$folder/nvml_test"
run "clients of MPS" inside "$cuda_front" "$folder/mps_test"
run "processes" inside "$cuda_front" "$folder/process_test" "$(realpath "$folder/linked")"
run "confined programs" inside "$cuda_front" "$folder/confined_test"
run "interleavings" inside "$folder/libcarve-cuda-steps.so" "$folder/puppet_test"
run "races" inside "$folder/libcarve-cuda-steps.so" "$folder/race_test" "$seconds"

# on_soft NAME DRIVER PROGRAM...: over a software GPU with a driver of that version, on its clock.
on_soft() {
    name=$1 driver=$2
    shift 2
    "$soft/softgpu" destroy "$root" > /dev/null 2>&1
    "$soft/softgpu" init "$root" $cards --driver "$driver" --clock "$clock" > "$output" 2>&1 || cat "$output"
    [ -z "$settings" ] || "$soft/softgpu" set "$root" $settings > "$output" 2>&1 || cat "$output"
    cuda_front=$plain_cuda nvml_front=$plain_nvml
    twins "$root"/usr/lib/*/libcuda.so.1 "$root"/usr/lib/*/libnvidia-ml.so.1
    cuda_front=$folder/twin-cuda.so nvml_front=$folder/twin-nvml.so
    run "$name, driver $driver" "$here/inside.sh" "$cuda_front" "$nvml_front" "soft:$root" - "$@"
}

settings=
cards='--card a100-80 --card a30'
clock=virtual
on_soft "compute" 550.90.07 "$(realpath "$folder/compute_test")"
cards='--card rtxpro6000 --card t4' # shares on cards with 188 and 40 processors (case vgpu-13)
on_soft "compute, other cards" 550.90.07 "$(realpath "$folder/compute_test")"
cards='--card a100-80 --card a30'
clock=real
# stepped NAME PROGRAM...: with the front whose steps can be armed.
stepped() {
    name=$1
    shift
    "$soft/softgpu" destroy "$root" > /dev/null 2>&1
    "$soft/softgpu" init "$root" --card a100-80 --card a30 --driver 550.90.07 > "$output" 2>&1 || cat "$output"
    run "$name" "$here/inside.sh" "$folder/libcarve-cuda-steps.so" "$plain_nvml" "soft:$root" - "$@"
}
stepped "robustness" "$(realpath "$folder/robust_test")"
stepped "reserves, interrupted" "$folder/reserve_test"
stepped "calls between steps of others" "$folder/between_test"
stepped "primary contexts, interrupted" "$folder/soft_test" steps
stepped "green contexts, interrupted" "$folder/green_test" steps
for driver in 535.104.05 550.90.07 570.86.10 580.65.06; do
    on_soft "loader" "$driver" env TWIN=1 "$folder/loader_test"
    # Not with sanitizers, whose runtime the linked programs would need.
    [ "$driver" = 535.104.05 ] && ! readelf -d "$plain_cuda" | grep -q libasan && on_soft "linkers" "$driver" "$here/linkers.sh" "$folder"
    on_soft "software GPU" "$driver" "$folder/soft_test"
    on_soft "pools" "$driver" "$folder/pool_test"
    on_soft "freed in streams" "$driver" "$folder/leaving_test"
    on_soft "arrays" "$driver" "$folder/array_test"
    on_soft "graphs" "$driver" "$folder/graph_test"
    on_soft "heaps" "$driver" "$folder/heap_test"
    on_soft "shared memory" "$driver" "$folder/shared_test"
    [ "$driver" = 535.104.05 ] || on_soft "green contexts" "$driver" "$folder/green_test"
    on_soft "visible cards" "$driver" "$folder/visible_test"
done
settings=stacks=110
on_soft "heaps of a driver that takes more" 550.90.07 "$folder/heap_test" more
settings='stacks=110 stacks-stay=1'
on_soft "heaps of one that keeps it" 550.90.07 "$folder/heap_test" more
settings=
cards='--card h100x2' # which have multicast
on_soft "multicast" 550.90.07 "$folder/multicast_test"

# A share of a card is as good as a card of that size: the same calls on both, every answer the same.
settings=
for seed in 1 2 3; do
    bare=$(mktemp) shared=$(mktemp)
    "$soft/softgpu" destroy "$root" > /dev/null 2>&1
    "$soft/softgpu" init "$root" --card h100x2 --driver 550.90.07 > "$output" 2>&1 || cat "$output"
    run "bare, seed $seed" env LD_LIBRARY_PATH="$(echo "$root"/usr/lib/*)" "$folder/same_test" "$bare" "$seed" 3000
    cards='--card h200x2' # the same but for the memory: 81008 MiB, and 520 MiB for a context, is what h100 has
    on_soft "as with a card of its own, seed $seed" 550.90.07 "$folder/same_test" "$shared" "$seed" 3000 81008 520
    if [ -s "$bare" ] && cmp -s "$bare" "$shared"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "not ok - seed $seed: a share and a card of its size differ, first here:"
        diff "$bare" "$shared" | head -6
    fi
    rm -f "$bare" "$shared"
done

# What the driver says no to, with the code by which it says so.
for driver in 535.104.05 570.86.10 580.65.06; do
    bare=$(mktemp) shared=$(mktemp)
    "$soft/softgpu" destroy "$root" > /dev/null 2>&1
    "$soft/softgpu" init "$root" --card a100-80 --card a30 --driver "$driver" > "$output" 2>&1 || cat "$output"
    run "bare codes, driver $driver" env LD_LIBRARY_PATH="$(echo "$root"/usr/lib/*)" "$folder/codes_test" "$bare"
    cards='--card a100-80 --card a30'
    on_soft "codes" "$driver" "$folder/codes_test" "$shared" 8000 420
    if [ -s "$bare" ] && cmp -s "$bare" "$shared"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "not ok - driver $driver: with a share codes are others, first here:"
        diff "$bare" "$shared" | head -20
    fi
    rm -f "$bare" "$shared"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
