#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# debian.sh FOLDER ARCHITECTURE "SUITE..." COMPONENT PACKAGE...: fetches packages from Debian and unpacks them below
# FOLDER, each version that the suites have, by apt with lists and a cache of its own: nothing of the machine's set-up
# changes, nothing is installed. The mirror is the one that this machine's apt uses. For tests here only; nothing of it
# is ever shipped. Prints the folders that are there at the end, those of earlier calls too; FOLDER/apt/log says why
# one isn't.
set -u
folder=$1 architecture=$2 suites=$3 component=$4
shift 4
mkdir -p "$folder/apt/$architecture-$component/partial" "$folder/apt/cache/archives/partial"
folder=$(realpath "$folder")
mirror=$(sed -n 's/^ *URIs: *\([^ ]*\).*/\1/p; s/^deb  *\(\[[^]]*\] *\)\{0,1\}\([^ ]*\) .*/\2/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2> /dev/null | head -1)
if [ -z "$mirror" ]; then
    echo "apt has no Debian mirror here: /etc/apt/sources.list names none" > "$folder/apt/log"
    exit 0
fi
for suite in $suites; do
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite $component"
done > "$folder/apt/sources.list"
: > "$folder/apt/status"
own() {
    command=$1
    shift
    "$command" -q -o "APT::Architecture=$architecture" -o "APT::Architectures::=$architecture" \
        -o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o "Dir::State::Lists=$folder/apt/$architecture-$component" -o "Dir::State::status=$folder/apt/status" \
        -o "Dir::Cache=$folder/apt/cache" -o APT::Sandbox::User=root \
        -o Acquire::Languages=none -o Acquire::Retries=2 -o Acquire::http::Timeout=20 "$@"
}
own apt-get update > "$folder/apt/log" 2>&1
for package; do
    for version in $(own apt-cache madison "$package" 2>> "$folder/apt/log" | awk '{ print $3 }' | sort -u); do
        to=$folder/$package-$version
        [ "$architecture" = amd64 ] || to=$to-$architecture
        [ -d "$to" ] && continue
        (cd "$folder/apt" && own apt-get download "$package:$architecture=$version" >> log 2>&1) &&
            dpkg-deb -x "$folder/apt/${package}_$(echo "$version" | sed 's/:/%3a/')_$architecture.deb" "$to.new" &&
            mv "$to.new" "$to"
    done
    find "$folder" -maxdepth 1 -name "$package-[0-9]*" ! -name '*.new' | sort
done
