#!/bin/sh
# Runs test programs one after the other, shows what they print, and closes
# with the sums. Ends with 1 when a check failed or a program died.
passed=0 failed=0
for program in "$@"; do
  echo "# ${program##*/}"
  log=$(mktemp)
  # script.sh:ARGUMENT is a script with an argument
  case $program in *.sh:*) set -- sh "${program%%:*}" "${program#*:}" ;; *) set -- "$program" ;; esac
  if ! timeout 300 "$@" > "$log" 2>&1 && ! grep -q '^not ok' "$log"; then
    echo "not ok - ${program##*/} ended badly" >> "$log"
  fi
  # a passing check is one line too many in a long build log
  if [ -n "$VERBOSE" ]; then cat "$log"; else grep -v '^ok ' "$log"; fi
  passed=$((passed + $(grep -c '^ok ' "$log")))
  failed=$((failed + $(grep -c '^not ok' "$log")))
  rm -f "$log"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
