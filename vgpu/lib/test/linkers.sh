#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# linkers.sh FOLDER: where twins stand in the driver's place (inside.sh), links programs with -lcuda -lnvidia-ml by each
# linker that is here, and runs them; and has the tools that read ELF files read the twins. FOLDER is for scratch.
# Says "N passed, M failed" at last.
set -u
here=$(dirname "$0") work=$(mktemp -d "$1/linkers.XXXXXX")
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# check NAME COMMAND...
check() {
    name=$1
    shift
    if "$@" > "$work/out" 2>&1; then
        passed=$((passed + 1))
        echo "ok $((passed + failed)) - $name"
    else
        failed=$((failed + 1))
        echo "not ok $((passed + failed)) - $name"
        sed 's/^/# /' "$work/out" | head -20
    fi
}
absent() {
    echo "# NOT TESTED: $1 isn't here (Debian: apt-get install $2)"
}
refuses() { ! "$@"; }

# ---- linkers ----

defines=
nm -D --defined-only "$LIBDIR/libcuda.so.1" > "$work/names"
grep -q ' cudbgInjectionPath$' "$work/names" && defines=-DWITH_VARIABLES
# The plainest programs: position-independent and not, all bound at the start, and one that is a library itself.
for linker in bfd gold lld; do
    program=ld.$linker
    if ! command -v "$program" > /dev/null; then
        case $linker in
        lld) absent "$program" lld ;;
        *) absent "$program" binutils ;;
        esac
        continue
    fi
    for flags in "" "-no-pie -fno-pic" "-Wl,-z,now" "-Wl,--no-allow-shlib-undefined -Wl,--as-needed"; do
        # shellcheck disable=SC2086 # lists of flags
        check "$program links a program with -lcuda -lnvidia-ml ($flags)" \
            gcc -O2 $flags $defines -fuse-ld=$linker "$here/linkers.c" -o "$work/program" -lcuda -lnvidia-ml -ldl
        check "  which needs both by name" \
            sh -c "readelf -d '$work/program' | grep -q 'NEEDED.*\[libcuda.so.1\]' && readelf -d '$work/program' | grep -q 'NEEDED.*\[libnvidia-ml.so.1\]'"
        check "  and runs without an environment" env -i "$work/program"
    done
    # shellcheck disable=SC2086
    check "$program links a library with them, all of whose names must be known" \
        gcc -O2 -shared -fPIC -Wl,-z,defs $defines -fuse-ld=$linker "$here/linkers.c" -o "$work/library.so" -lcuda -lnvidia-ml -ldl
    check "  which a program opens for itself" \
        sh -c "cat > '$work/open.c' <<'EOF'
#include <dlfcn.h>
int main(int argc, char **argv) {
    void *handle = dlopen(argv[argc - 1], RTLD_NOW | RTLD_LOCAL);
    int (*run)(void) = (int (*)(void))(handle ? dlsym(handle, \"main\") : 0);
    return run ? run() : 9;
}
EOF
gcc '$work/open.c' -o '$work/open' -ldl && '$work/open' '$work/library.so'"
    check "$program refuses a function that no driver has" \
        refuses gcc -DUNKNOWN=cuThatNoDriverHas -fuse-ld=$linker "$here/linkers.c" -o "$work/program" -lcuda -lnvidia-ml -ldl
    if ! grep -q ' cuCtxCreate_v4$' "$work/names"; then
        check "$program refuses a hook that this driver lacks" \
            refuses gcc -DUNKNOWN=cuCtxCreate_v4 -fuse-ld=$linker "$here/linkers.c" -o "$work/program" -lcuda -lnvidia-ml -ldl
    fi
done

# ---- other ways in ----

# shellcheck disable=SC2086
gcc -O2 $defines "$here/linkers.c" -o "$work/program" -lcuda -lnvidia-ml -ldl
check "a linked program runs with all bound at the start" env -i LD_BIND_NOW=1 "$work/program"
check "and with libcuda preloaded" env -i LD_PRELOAD=libcuda.so.1:libnvidia-ml.so.1 "$work/program"
if [ "$(id -u)" = 0 ] && setpriv --reuid 65534 --clear-groups true 2> /dev/null; then
    cp "$work/program" /usr/lib/carve/setuid && chmod 4755 /usr/lib/carve/setuid
    check "and set-uid, for another user" setpriv --reuid 65534 --regid 65534 --clear-groups env LD_LIBRARY_PATH=/nowhere /usr/lib/carve/setuid
fi
if command -v python3 > /dev/null; then
    check "Python's ctypes finds what the driver has, and nothing else" python3 -c "
import ctypes
cuda, driver = ctypes.CDLL('libcuda.so.1'), ctypes.CDLL('/usr/lib/carve/driver/libcuda.so.1')
names = [l.split()[-1] for l in open('$work/names')]
assert len(names) > 300 and all(hasattr(cuda, n) for n in names)
for n in 'cuCtxCreate_v3', 'cuCtxCreate_v4', 'cuGetProcAddress_v2', 'cuThatNoDriverHas':
    assert hasattr(cuda, n) == hasattr(driver, n) == (n in names), n
version = ctypes.c_int()
assert cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value >= 11000"
else
    absent python3 python3
fi

# ---- tools ----

# quiet COMMAND...: a tool that ends well and complains of nothing.
quiet() {
    "$@" > "$work/tool" 2> "$work/complaints" || return
    # readelf complains on its output, too.
    ! grep -E '^[a-z-]+: (Warning|Error|warning|error)|<corrupt|<no-strings>' "$work/tool" "$work/complaints" && [ ! -s "$work/complaints" ]
}
for library in libcuda.so.1 libnvidia-ml.so.1; do
    twin=$LIBDIR/$library
    for tool in "readelf -aW" "readelf -W --dyn-syms -D" "objdump -x" "objdump -T" "objdump -d -j .text" "nm" "nm -D" "size -A" \
        "strip -o $work/stripped" "objcopy --strip-debug --enable-deterministic-archives"; do
        case $tool in
        objcopy*) check "${tool%% *} reads $library" quiet objcopy --strip-debug "$twin" "$work/copied" ;;
        # shellcheck disable=SC2086
        *) check "$tool reads $library" quiet $tool "$twin" ;;
        esac
    done
    check "stripped, $library lists the same" sh -c "nm -D --defined-only '$twin' | cut -d' ' -f2,3 > '$work/a'; nm -D --defined-only '$work/stripped' | cut -d' ' -f2,3 > '$work/b'; cmp '$work/a' '$work/b'"
    if command -v eu-elflint > /dev/null; then
        check "eu-elflint finds no fault in $library" eu-elflint --gnu-ld -q "$twin"
    else
        absent eu-elflint elfutils
    fi
done
if command -v gdb > /dev/null; then
    gcc -O2 $defines "$here/linkers.c" -o "$work/program" -lcuda -lnvidia-ml -ldl
    gdb -q -batch -ex 'break main' -ex run -ex 'info symbol cuDriverGetVersion' -ex 'info symbol cuMemAlloc_v2' -ex 'print &cudbgInjectionPath' \
        "$work/program" > "$work/gdb" 2>&1
    # A debugger must come to the code and the variables that the program uses, whatever the twin lists.
    check "gdb finds what isn't hooked in the driver" grep -q 'cuDriverGetVersion in section .text of /usr/lib/carve/driver/libcuda.so.1' "$work/gdb"
    check "gdb says nothing bad of the twins" refuses grep -iE 'warning: |bad |corrupt|not in executable format' "$work/gdb"
    if [ -n "$defines" ]; then
        check "gdb finds variables where they are" sh -c "grep -q 'cudbgInjectionPath>' '$work/gdb'"
    fi
else
    absent gdb gdb
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
