#include "ptx.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the text without comments, blanks reduced --------------------------- */

static char *plain_text(const char *text) {
  size_t length = strlen(text);
  char *out = malloc(length + 2), *to = out;
  if (!out) return NULL;
  for (const char *at = text; *at;) {
    if (at[0] == '/' && at[1] == '/') {
      while (*at && *at != '\n') at++;
    } else if (at[0] == '/' && at[1] == '*') {
      const char *end = strstr(at + 2, "*/");
      at = end ? end + 2 : at + strlen(at);
    } else if (isspace((unsigned char)*at)) {
      at++;
    } else {
      *to++ = *at++;
      continue;
    }
    if (to != out && to[-1] != ' ') *to++ = ' ';
  }
  *to = 0;
  return out;
}

static uint64_t hash(const char *from, const char *to) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (; from < to; from++) {
    if (*from == ' ') continue;
    h = (h ^ (unsigned char)*from) * 0x100000001b3ull;
  }
  return h;
}

static bool name_character(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%'; }

static char *copy_name(const char *from) {
  size_t length = 0;
  while (name_character(from[length])) length++;
  char *name = length ? malloc(length + 1) : NULL;
  if (!name) return NULL;
  memcpy(name, from, length);
  name[length] = 0;
  return name;
}

/* Size of .u64, .f32, .b8 and the like. */
static unsigned int type_bytes(const char *type) {
  if (type[0] != '.' || !strchr("usfb", type[1])) return 0;
  int bits = atoi(type + 2);
  return bits == 8 || bits == 16 || bits == 32 || bits == 64 ? (unsigned int)bits / 8 : 0;
}

/* ---- directives ---------------------------------------------------------- */

static bool read_parameters(const char *from, const char *to, ptx_entry *entry) {
  while ((from = strstr(from, ".param")) && from < to) {
    const char *stop = memchr(from, ',', (size_t)(to - from));
    if (!stop) stop = to;
    unsigned int bytes = 0;
    for (const char *at = from + 6; at < stop && !bytes; at++)
      if (*at == '.') bytes = type_bytes(at);
    const char *bracket = memchr(from, '[', (size_t)(stop - from));
    uint64_t all = bracket ? bytes * (uint64_t)atoi(bracket + 1) : bytes;
    if (!all || all > 255 || entry->parameter_count == PTX_PARAMETERS) return false;
    entry->parameter_bytes[entry->parameter_count++] = (uint8_t)all;
    from = stop;
  }
  return true;
}

static bool add_entry(ptx_image *image, const char *at, const char **end) {
  const char *name = at + strlen(".entry");
  while (*name == ' ') name++;
  const char *body = strchr(name, '{');
  if (!body) return false;
  int depth = 0;
  const char *close = body;
  for (; *close; close++) {
    if (*close == '{') depth++;
    if (*close == '}' && --depth == 0) break;
  }
  if (!*close) return false;
  ptx_entry *grown = realloc(image->entries, (image->entry_count + 1) * sizeof *grown);
  if (!grown) return false;
  image->entries = grown;
  ptx_entry *entry = &grown[image->entry_count];
  *entry = (ptx_entry){.name = copy_name(name)};
  if (!entry->name) return false;
  image->entry_count++;
  const char *parameters = memchr(name, '(', (size_t)(body - name));
  if (parameters && !read_parameters(parameters, body, entry)) return false;
  entry->text_hash = hash(name + strlen(entry->name), close + 1);
  *end = close + 1;
  return true;
}

static bool add_global(ptx_image *image, const char *at, const char **end) {
  const char *stop = strchr(at, ';');
  if (!stop) return false;
  unsigned int bytes = 0;
  const char *cursor = at + strlen(".global");
  while (cursor < stop && !bytes) {
    if (*cursor == '.') bytes = type_bytes(cursor);
    cursor++;
  }
  if (!bytes) return false;
  while (cursor < stop && name_character(*cursor)) cursor++; /* rest of the type */
  while (cursor < stop && *cursor == ' ') cursor++;
  ptx_global *grown = realloc(image->globals, (image->global_count + 1) * sizeof *grown);
  if (!grown) return false;
  image->globals = grown;
  ptx_global *global = &grown[image->global_count];
  *global = (ptx_global){.name = copy_name(cursor)};
  if (!global->name) return false;
  image->global_count++;
  uint64_t count = 1;
  cursor += strlen(global->name);
  while (cursor < stop && *cursor == ' ') cursor++;
  if (*cursor == '[') count = strtoull(cursor + 1, NULL, 10);
  if (!count || count > (1ull << 40) / bytes) return false;
  global->bytes = count * bytes;
  *end = stop + 1;
  return true;
}

static CUresult read_plain(const char *plain, ptx_image *out) {
  int major = 0, minor = 0;
  const char *version = strstr(plain, ".version "), *target = strstr(plain, ".target sm_");
  if (!version && !target) return CUDA_ERROR_INVALID_IMAGE;
  if (!version || !target || sscanf(version, ".version %d.%d", &major, &minor) != 2) return CUDA_ERROR_INVALID_PTX;
  out->version = major * 10 + minor;
  out->target = atoi(target + strlen(".target sm_"));
  for (const char *at = plain; *at;) {
    bool ok = true;
    if (strncmp(at, ".entry ", 7) == 0) ok = add_entry(out, at, &at);
    else if (strncmp(at, ".global ", 8) == 0) ok = add_global(out, at, &at);
    else at++;
    if (!ok) return CUDA_ERROR_INVALID_PTX;
  }
  return CUDA_SUCCESS;
}

CUresult ptx_read(const void *image, ptx_image *out) {
  uint32_t magic;
  *out = (ptx_image){0};
  memcpy(&magic, image, sizeof magic);
  if (magic == 0x464c457fu || magic == 0xba55ed50u) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  const char *text = image;
  if (!isprint((unsigned char)text[0]) && !isspace((unsigned char)text[0])) return CUDA_ERROR_INVALID_IMAGE;
  char *plain = plain_text(text);
  if (!plain) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = read_plain(plain, out);
  free(plain);
  if (result != CUDA_SUCCESS) ptx_free(out);
  return result;
}

void ptx_free(ptx_image *image) {
  for (size_t i = 0; i < image->entry_count; i++) free(image->entries[i].name);
  for (size_t i = 0; i < image->global_count; i++) free(image->globals[i].name);
  free(image->entries);
  free(image->globals);
  *image = (ptx_image){0};
}
