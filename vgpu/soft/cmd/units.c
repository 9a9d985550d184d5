#include "units.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const char *name; uint64_t factor; } unit;

static bool scaled(const char *text, const unit *units, bool bare, uint64_t *out) {
  char *end;
  if (!text || *text < '0' || *text > '9') return false;
  errno = 0;
  unsigned long long number = strtoull(text, &end, 10);
  if (errno) return false;
  if (!*end) {
    if (!bare && number) return false;
    *out = number;
    return true;
  }
  for (; units->name; units++) {
    if (strcmp(end, units->name) != 0) continue;
    if (number > UINT64_MAX / units->factor) return false;
    *out = number * units->factor;
    return true;
  }
  return false;
}

bool units_bytes(const char *text, uint64_t *out) {
  static const unit units[] = {{"B", 1}, {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40}, {NULL, 0}};
  return scaled(text, units, true, out);
}

bool units_nanoseconds(const char *text, uint64_t *out) {
  static const unit units[] = {{"ns", 1}, {"us", 1000}, {"ms", 1000000}, {"s", 1000000000}, {"m", 60000000000ull}, {"h", 3600000000000ull}, {NULL, 0}};
  return scaled(text, units, false, out);
}

bool units_number(const char *text, uint64_t *out) {
  static const unit none[] = {{NULL, 0}};
  return scaled(text, none, true, out);
}

void json_text(FILE *to, const char *text) {
  fputc('"', to);
  for (; *text; text++) {
    unsigned char c = (unsigned char)*text;
    if (c == '"' || c == '\\') fprintf(to, "\\%c", c);
    else if (c < 0x20 || c >= 0x7f) fprintf(to, "\\u%04x", c);
    else fputc(c, to);
  }
  fputc('"', to);
}
