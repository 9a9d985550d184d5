#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# oracle.sh FOLDER CUDA_FRONT NVML_FRONT NVML_DRIVER DRIVERS TWIN: the hook table against real drivers' libraries, and
# the front over each of them, as it was built and as its twin, which TWIN makes. DRIVERS is where they are, or are fetched to if there are none. Where none can be had this
# says so and does nothing: the software GPU's tables, which the usual tests use, hold what R535 and R550 export.
set -u
folder=$1 cuda_front=$2 nvml_front=$3 nvml=$4 drivers=$5 twin=$6
here=$(dirname "$0")
found=$(find "$drivers" -name 'libcuda.so.[0-9]*.*' -type f 2> /dev/null | sort)
[ -n "$found" ] || found=$("$here/drivers.sh" "$drivers")
if [ -z "$found" ]; then
    echo "################################################################################"
    echo "# NOT TESTED: no real driver library in $drivers, and none could be fetched"
    echo "# (see $drivers/apt/log). Put libcuda.so.<version> there, or name a folder that"
    echo "# has some: make -C vgpu/lib oracle DRIVERS=/path"
    echo "################################################################################"
    exit 0
fi
failed=0
# shellcheck disable=SC2086 # a list of paths
"$folder/oracle_test" "$here/not_hooked.tbl" "$here/../../soft/tables/cuda_exports.tbl" $found || failed=1
for library in $found; do
    echo "# the front over ${library##*/}"
    "$here/inside.sh" "$cuda_front" "$nvml_front" "$library" "$nvml" "$folder/loader_test" > "$folder/oracle.log" 2>&1 || failed=1
    grep -v '^ok ' "$folder/oracle.log"
    version=${library##*/libcuda.so.}
    real_nvml=$(find "$drivers" -name "libnvidia-ml.so.$version" -type f | head -1)
    if [ -z "$real_nvml" ]; then
        echo "# NOT TESTED: its twin, for want of libnvidia-ml.so.$version beside it"
        continue
    fi
    echo "# its twin over the same, with NVML of that driver"
    { "$twin" -front "$cuda_front" -driver "$library" -o "$folder/twin-cuda.so" &&
        "$twin" -front "$nvml_front" -driver "$real_nvml" -o "$folder/twin-nvml.so" &&
        "$here/inside.sh" "$folder/twin-cuda.so" "$folder/twin-nvml.so" "$library" "$real_nvml" env TWIN=1 "$folder/loader_test" &&
        "$here/inside.sh" "$folder/twin-cuda.so" "$folder/twin-nvml.so" "$library" "$real_nvml" "$here/linkers.sh" "$folder"
    } > "$folder/oracle.log" 2>&1 || failed=1
    grep -v '^ok ' "$folder/oracle.log"
done
exit $failed
