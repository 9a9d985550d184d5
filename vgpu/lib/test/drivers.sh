#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# drivers.sh FOLDER: fetches real driver libraries from Debian's non-free packages into FOLDER, as debian.sh does.
# Prints the files of libcuda.
set -u
"$(dirname "$0")/debian.sh" "$1" amd64 "bookworm trixie" non-free \
    libcuda1 libnvidia-ml1 libnvidia-tesla-470-cuda1 libnvidia-tesla-470-ml1 > /dev/null
find "$1" -name 'libcuda.so.[0-9]*.*' -path '*x86_64*' -type f | sort
