# nvml.awk - turns nvml_exports.tbl into C (mode=c) or a version script (mode=map, branch=N).
/^#/ || NF < 3 { next }
mode == "map" { if ($2 <= branch) print "    " $1 ";"; next }
$3 == "-" { print "EXPORT nvmlReturn_t " $1 "(void) { return nvml_unmodelled(\"" $1 "\"); }" }
BEGIN {
  if (mode == "map") print "{\n  global:"
  else print "/* Generated from tables/nvml_exports.tbl. */\n#include \"unmodelled.h\"\n"
}
END { if (mode == "map") print "  local: *;\n};" }
