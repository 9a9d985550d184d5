#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# inside.sh CUDA_FRONT NVML_FRONT CUDA_DRIVER NVML_DRIVER COMMAND...: runs a command where the fronts stand in
# the driver's place as they do in a container: the same inode behind both names, the driver's own files at the
# private path. All of it in a mount namespace that ends with the command; nothing of the machine is changed.
#
# With a software GPU's root in place of the two drivers ("soft:ROOT -"), its state and device nodes are there too.
set -eu
if [ "${1:-}" != --entered ]; then
    if [ "$(id -u)" = 0 ]; then
        exec unshare --mount --propagation private -- "$0" --entered "$@"
    fi
    exec unshare --user --map-root-user --mount --propagation private -- "$0" --entered "$@"
fi
shift
cuda_front=$(realpath "$1") nvml_front=$(realpath "$2") soft=
case $3 in
soft:*)
    soft=$(realpath "${3#soft:}")
    cuda=$(realpath "$soft"/usr/lib/*/libcuda.so.1) nvml=$(realpath "$soft"/usr/lib/*/libnvidia-ml.so.1)
    ;;
*) cuda=$(realpath "$3") nvml=$(realpath "$4") ;;
esac
shift 4

version=550.90.07
scratch=$(mktemp -d)
mount -t tmpfs -o mode=755 carve-test "$scratch"
# What is left of it is an empty folder, under the mount; it goes with the command.
trap 'umount -l "$scratch" 2>/dev/null; rmdir "$scratch" 2>/dev/null || true' EXIT
mkdir "$scratch/upper" "$scratch/work"
mount -t overlay -o "lowerdir=/usr/lib,upperdir=$scratch/upper,workdir=$scratch/work" carve-test /usr/lib
libdir=/usr/lib/$(gcc -dumpmachine 2>/dev/null || uname -m)
[ -d "$libdir" ] || libdir=/usr/lib/$(uname -m)-linux-gnu
rm -rf /usr/lib/carve
mkdir -p /usr/lib/carve/driver "$libdir"
cp "$cuda" /usr/lib/carve/driver/libcuda.so.1
cp "$nvml" /usr/lib/carve/driver/libnvidia-ml.so.1
for library in libcuda libnvidia-ml; do
    [ $library = libcuda ] && front=$cuda_front || front=$nvml_front
    rm -f "$libdir/$library.so" "$libdir/$library.so.1" "$libdir/$library.so."[0-9]*
    cp "$front" "$libdir/$library.so.$version"
    : > "$libdir/$library.so.1"
    mount --bind "$libdir/$library.so.$version" "$libdir/$library.so.1"
    ln -s $library.so.1 "$libdir/$library.so"
done
if [ -n "$soft" ]; then
    mkdir -p /usr/lib/softgpu "$scratch/dev"
    mount --bind "$soft/softgpu" /usr/lib/softgpu
    mount -t tmpfs -o mode=755 carve-test "$scratch/dev"
    for node in null zero full random urandom tty; do
        : > "$scratch/dev/$node"
        mount --bind "/dev/$node" "$scratch/dev/$node"
    done
    for node in "$soft"/dev/*; do
        : > "$scratch/dev/${node##*/}"
        mount --bind "$node" "$scratch/dev/${node##*/}"
    done
    mkdir "$scratch/dev/shm" "$scratch/dev/pts"
    mount --bind /dev/shm "$scratch/dev/shm"
    mount --rbind "$scratch/dev" /dev
    cp "$soft/usr/bin/nvidia-smi" /usr/lib/carve/nvidia-smi
fi
LIBDIR=$libdir DRIVER_VERSION=$version "$@"
