#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# check-front.sh LIBRARY SONAME NEEDED NEWEST_GLIBC MAP: what a front must and must not be.
set -eu
library=$1 soname=$2 needed=$3 newest=$4 map=$5
fail() { echo "check $library: $*" >&2; exit 1; }

dynamic=$(readelf -dW "$library")
echo "$dynamic" | grep -q "SONAME.*\[$soname\]" || fail "its SONAME is not $soname"
# The first one, so that it is searched before libc and never found under its own, shared, name.
first=$(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | head -1)
[ "$first" = "$needed" ] || fail "its first NEEDED is $first, not $needed"
others=$(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | tail -n +2 | grep -vE '^(libc\.so\.6|libdl\.so\.2|ld-linux-.*)$' || true)
[ -z "$others" ] || fail "it needs $others"
echo "$dynamic" | grep -q 'FLAGS_1.*NODELETE' || fail "it can be unloaded"
echo "$dynamic" | grep -qE '\((INIT|FINI|PREINIT)(_ARRAY)?\)' && fail "it has constructors or destructors"
echo "$dynamic" | grep -q TEXTREL && fail "it has text relocations"

sections=$(readelf -SW "$library")
for section in .carve.room .carve.behind .carve.data .symtab; do
    echo "$sections" | grep -qF " $section " || fail "it has no $section, which its twin needs"
done

too_new=$(objdump -T "$library" | grep -oE 'GLIBC_[0-9.]+' | sort -Vu | awk -F_ -v newest="$newest" '
    { split($2, a, "."); split(newest, b, "."); if (a[1] > b[1] || (a[1] == b[1] && a[2] > b[2])) print $0 }')
[ -z "$too_new" ] || fail "it needs $too_new, newer than GLIBC_$newest"

exported=$(nm -D --defined-only "$library" | awk '{ print $3 }' | sort)
declared=$(grep -oE '\b(cu|nvml)[A-Za-z0-9_]+' "$map" | sort -u)
[ "$exported" = "$declared" ] || fail "it exports other names than its table has:
$(printf '%s\n' "$exported" "$declared" | sort | uniq -u)"
forbidden=$(nm -D --undefined-only "$library" | grep -oE '\b(malloc|calloc|realloc|free|printf|fprintf|exit|_exit|abort|getenv|setenv|putenv|pthread_create|signal|sigaction|atexit)(@|$)' || true)
[ -z "$forbidden" ] || fail "it calls $forbidden"
# Points at which a thread can be cancelled, with a lock of ours held, and clocks that jump.
forbidden=$(nm -D --undefined-only "$library" | grep -oE '\b(open|open64|openat|close|read|pread|pread64|write|nanosleep|clock_nanosleep|usleep|sleep|poll|select|pause|sem_wait|time|gettimeofday|clock|timespec_get)(@|$)' || true)
[ -z "$forbidden" ] || fail "it calls $forbidden"
