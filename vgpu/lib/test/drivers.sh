#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# drivers.sh FOLDER: fetches real driver libraries from Debian's non-free packages into FOLDER, by apt with lists and
# a cache of its own: nothing of the machine's set-up changes, nothing is installed. The mirror is the one that this
# machine's apt uses. For tests here only; nothing of it is ever shipped.
set -u
folder=$1
mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial"
folder=$(realpath "$folder")
mirror=$(sed -n 's/^ *URIs: *\([^ ]*\).*/\1/p; s/^deb  *\(\[[^]]*\] *\)\{0,1\}\([^ ]*\) .*/\2/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2> /dev/null | head -1)
for suite in bookworm trixie; do
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian} $suite non-free"
done > "$folder/apt/sources.list"
own() {
    command=$1
    shift
    "$command" -q -o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o "Dir::State::Lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o APT::Sandbox::User=root \
        -o Acquire::Retries=2 -o Acquire::http::Timeout=20 "$@"
}
own apt-get update > "$folder/apt/log" 2>&1
for package in libcuda1 libnvidia-ml1 libnvidia-tesla-470-cuda1 libnvidia-tesla-470-ml1; do
    for version in $(own apt-cache madison "$package" 2>> "$folder/apt/log" | awk '{ print $3 }' | sort -u); do
        [ -d "$folder/$package-$version" ] && continue
        (cd "$folder/apt" && own apt-get download "$package=$version" >> log 2>&1) &&
            dpkg-deb -x "$folder/apt/${package}_$(echo "$version" | sed 's/:/%3a/')"_*.deb "$folder/$package-$version.new" &&
            mv "$folder/$package-$version.new" "$folder/$package-$version"
    done
done
find "$folder" -name 'libcuda.so.[0-9]*.*' -type f | sort
