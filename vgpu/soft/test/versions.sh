#!/bin/sh
# Nothing that is loaded into images may need a symbol newer than GLIBC_2.17.
# versions.sh BUILDDIR
n=0 bad=0
for file in "$1"/libcuda-*.so "$1"/libnvidia-ml-*.so "$1"/gpuprobe "$1"/nvidia-smi "$1"/nvidia-cuda-mps-control "$1"/nvidia-cuda-mps-server; do
  n=$((n + 1))
  newest=$(objdump -T "$file" 2> /dev/null | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
  if [ "$(printf '%s\nGLIBC_2.17\n' "$newest" | sort -V | tail -1)" = GLIBC_2.17 ]; then
    echo "ok $n - ${file##*/} needs nothing newer than ${newest:-itself}"
  else
    echo "not ok $n - ${file##*/} needs $newest:"
    objdump -T "$file" | grep "$newest" | sed 's/^/# /'
    bad=$((bad + 1))
  fi
done
for file in "$1"/libcuda-550.so "$1"/libnvidia-ml-550.so; do
  n=$((n + 1))
  want=libcuda.so.1
  case $file in *nvidia-ml*) want=libnvidia-ml.so.1 ;; esac
  if objdump -p "$file" | grep -q "SONAME *$want\$"; then
    echo "ok $n - ${file##*/} is $want to the loader"
  else
    echo "not ok $n - ${file##*/} has no SONAME $want"
    bad=$((bad + 1))
  fi
done
n=$((n + 1))
if objdump -p "$1/gpuprobe" | grep -q 'NEEDED.*libcuda'; then
  echo "not ok $n - gpuprobe links libcuda"
  bad=$((bad + 1))
else
  echo "ok $n - gpuprobe does not link libcuda"
fi
echo "$((n - bad)) passed, $bad failed"
[ "$bad" -eq 0 ]
