#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# pack.sh FOLDER RUN: makes the bundle's folder, and FOLDER.tar.gz of it, out of what is built. RUN is the runner.
# Called in the root of the tree.
set -eu
folder=$1 run=$2
rm -rf "$folder" "$folder.tar.gz"
mkdir -p "$folder/bin" "$folder/lib" "$folder/python"
cp "$run" "$folder/run"
cp vgpu/soft/build/gpuprobe "$folder/bin/"
for program in array graph pool shared; do cp "vgpu/lib/build/test/${program}_test" "$folder/bin/"; done
cp vgpu/lib/build/libcarve-cuda.so vgpu/lib/build/libcarve-nvml.so "$folder/lib/"
cp vgpu/bundle/python/*.py "$folder/python/"
cp LICENSE "$folder/"
# The runner reaches NVML through cgo, so it needs a C library that isn't older than what it was linked with.
glibc=$(objdump -T "$run" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1 | sed 's/GLIBC_//')
sed "s/GLIBC_NEEDED/$glibc/" vgpu/bundle/README.md > "$folder/README.md"
tar -C "$(dirname "$folder")" --owner=0 --group=0 -czf "$folder.tar.gz" "$(basename "$folder")"
size=$(stat -c %s "$folder.tar.gz")
echo "$folder.tar.gz: $((size / 1024)) KiB, needs glibc $glibc"
[ "$size" -lt $((60 * 1024 * 1024)) ] || { echo "more than 60 MiB"; exit 1; }
