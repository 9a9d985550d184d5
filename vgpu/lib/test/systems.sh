#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# systems.sh FOLDER STUB TWIN CUDA_FRONT NVML_FRONT AARCH64_FOLDER: a linked program over the twins of a real driver's
# libraries, with other C libraries than this machine's, in roots of their own, and on aarch64. What isn't here and
# can't be fetched is said loudly, and nothing fails for it. FOLDER is for what is fetched and made; STUB is the libdl
# that the fronts are linked with, TWIN makes twins, AARCH64_FOLDER has the fronts of that architecture, or - for none.
# Says "N passed, M failed" at last.
set -u
folder=$1 stub=$2 twin=$3 cuda_front=$4 nvml_front=$5 aarch64=$6
here=$(dirname "$0")
passed=0 failed=0
not_tested() {
    echo "################################################################################"
    echo "# NOT TESTED: $1"
    echo "################################################################################"
}
# check NAME COMMAND...
check() {
    name=$1
    shift
    if "$@" > "$folder/out" 2>&1; then
        passed=$((passed + 1))
        echo "ok $((passed + failed)) - $name"
    else
        failed=$((failed + 1))
        echo "not ok $((passed + failed)) - $name (status $?)"
        sed 's/^/# /' "$folder/out" | head -20
    fi
}
# place ROOT LIBDIR CUDA NVML FRONT FRONT: twins of a driver where a container of that root has them.
place() {
    mkdir -p "$1/usr/lib/carve/driver"
    cp "$3" "$1/usr/lib/carve/driver/libcuda.so.1" && cp "$4" "$1/usr/lib/carve/driver/libnvidia-ml.so.1" &&
        "$twin" -front "$5" -driver "$3" -o "$1/$2/libcuda.so.1" && "$twin" -front "$6" -driver "$4" -o "$1/$2/libnvidia-ml.so.1" &&
        ln -sf libcuda.so.1 "$1/$2/libcuda.so" && ln -sf libnvidia-ml.so.1 "$1/$2/libnvidia-ml.so"
}
library() { find "$folder" -path "*$3*" -name "$1.so.$2*" -type f | sort | tail -1; }
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else unshare --user --map-root-user "$@"; fi
}

# ---- other C libraries ----

"$here/debian.sh" "$folder" amd64 "bookworm trixie" non-free libcuda1 libnvidia-ml1 > /dev/null
libcs=$("$here/debian.sh" "$folder" amd64 "bullseye bookworm trixie" main libc6)
cuda=$(library libcuda 550 x86_64) nvml=$(library libnvidia-ml 550 x86_64)
if [ "$(uname -m)" != x86_64 ] || [ -z "$libcs" ] || [ -z "$cuda" ] || [ -z "$nvml" ]; then
    not_tested "the twin under other C libraries: they, or a driver's libraries, aren't here and couldn't be fetched (see $folder/apt/log)"
    libcs=
fi
for libc in $libcs; do
    root=$folder/root-${libc##*/}
    rm -rf "$root"
    cp -a "$libc" "$root"
    libdir=lib/x86_64-linux-gnu
    if [ ! -d "$root/$libdir" ]; then # /lib is a link there, which comes with another package
        libdir=usr/lib/x86_64-linux-gnu
        ln -s usr/lib "$root/lib"
    fi
    [ -e "$root/lib64/ld-linux-x86-64.so.2" ] || { [ -d "$root/usr/lib64" ] && ln -s usr/lib64 "$root/lib64"; }
    check "twins of ${cuda##*/} in a root with ${libc##*/}" place "$root" "$libdir" "$cuda" "$nvml" "$cuda_front" "$nvml_front"
    # Linked with this machine's C library, and yet for the oldest.
    for flags in "" "-no-pie -fno-pic" "-Wl,-z,now"; do
        # shellcheck disable=SC2086
        check "  a program linked with them ($flags)" gcc -O2 $flags -DWITH_VARIABLES -fno-stack-protector -nostartfiles "$here/linkers.c" \
            "$here/../../soft/cmd/oldstart.c" -o "$root/program" "-L$root/$libdir" -Wl,--no-as-needed "$stub" -lcuda -lnvidia-ml \
            "-Wl,-rpath-link,$root/$libdir"
        check "  runs there" as_root chroot "$root" /program
    done
    rm -rf "$root"
done

# ---- aarch64 ----

"$here/debian.sh" "$folder" arm64 "bookworm trixie" non-free libcuda1 libnvidia-ml1 > /dev/null
cuda=$(library libcuda 550 aarch64) nvml=$(library libnvidia-ml 550 aarch64)
if [ "$aarch64" = - ]; then
    not_tested "the twin on aarch64: no compiler for it (Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)"
elif [ -z "$cuda" ] || [ -z "$nvml" ]; then
    not_tested "the twin on aarch64: a driver's libraries for it couldn't be fetched (see $folder/apt/log)"
elif ! command -v qemu-aarch64-static > /dev/null; then
    not_tested "the twin on aarch64: nothing runs it here (Debian: apt-get install qemu-user-static)"
else
    root=$folder/root-aarch64
    rm -rf "$root"
    mkdir "$root"
    cp -a /usr/aarch64-linux-gnu/lib "$root/lib"
    check "twins of ${cuda##*/} for aarch64" place "$root" lib "$cuda" "$nvml" "$aarch64/libcarve-cuda.so" "$aarch64/libcarve-nvml.so"
    for flags in "" "-no-pie -fno-pic" "-Wl,-z,now"; do
        # shellcheck disable=SC2086
        check "  a program linked with them ($flags)" aarch64-linux-gnu-gcc -O2 $flags -DWITH_VARIABLES "$here/linkers.c" \
            -o "$root/program" "-L$root/lib" -lcuda -lnvidia-ml -ldl "-Wl,-rpath-link,$root/lib"
        check "  runs" qemu-aarch64-static -L "$root" "$root/program"
    done
    if command -v eu-elflint > /dev/null; then
        check "  eu-elflint finds no fault" eu-elflint --gnu-ld -q "$root/lib/libcuda.so.1"
    fi
    rm -rf "$root"
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
