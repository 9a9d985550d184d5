# cuda.awk - turns cuda_exports.tbl into C (mode=c) or a version script (mode=map, branch=N).
/^#/ || NF < 6 { next }
mode == "map" { if ($5 <= branch) names = names "    " $1 ";\n"; next }
{
  rows[++count] = $0
  if ($6 == "-") stubs = stubs "EXPORT CUresult " $1 "(void) { return soft_unmodelled(\"" $1 "\"); }\n"
  else declared = declared "extern CUresult " $1 "();\n"
}
END {
  if (mode == "map") {
    print "{\n  global:\n" names "    softgpu_*;\n  local: *;\n};"
    exit
  }
  print "/* Generated from tables/cuda_exports.tbl. */"
  print "#define EXPORT __attribute__((visibility(\"default\")))"
  print "typedef int CUresult;\nCUresult soft_unmodelled(const char *symbol);\n"
  print "#include \"procaddress.h\"\n"
  print stubs declared
  print "const export_row export_table[] = {"
  for (i = 1; i <= count; i++) {
    split(rows[i], f)
    printf "    {\"%s\", %s, %su, %s, %s, (void (*)(void))%s},\n", f[1], f[2] == "-" ? "0" : "\"" f[2] "\"", f[3],
      f[4] == "legacy" ? "EXPORT_LEGACY" : f[4] == "thread" ? "EXPORT_THREAD" : "EXPORT_ANY", f[5], f[1]
  }
  print "};\nconst unsigned int export_count = sizeof export_table / sizeof export_table[0];"
}
