/* handles.c - which pointers are handles: an open-addressed table, under the process lock. */
#include <stdlib.h>

#include "driver.h"

typedef struct { const void *handle; handle_kind kind; } entry;

static entry *table;
static size_t capacity, used; /* used counts removed ones too */

static size_t place(const void *handle, size_t size) {
  uint64_t key = (uint64_t)(uintptr_t)handle * 0x9E3779B97F4A7C15ull;
  return (size_t)(key >> 20) & (size - 1);
}

static bool grow(void) {
  size_t live = 0;
  for (size_t i = 0; i < capacity; i++) live += table[i].kind != HANDLE_NONE;
  size_t size = capacity ? capacity : 256;
  while (size < live * 4) size *= 2;
  entry *fresh = calloc(size, sizeof *fresh);
  if (!fresh) return false;
  for (size_t i = 0; i < capacity; i++) {
    if (table[i].kind == HANDLE_NONE) continue;
    size_t at = place(table[i].handle, size);
    while (fresh[at].handle) at = (at + 1) & (size - 1);
    fresh[at] = table[i];
  }
  free(table);
  table = fresh;
  capacity = size;
  used = live;
  return true;
}

bool handle_add(const void *handle, handle_kind kind) {
  if ((!capacity || used * 2 >= capacity) && !grow()) return false;
  size_t at = place(handle, capacity);
  while (table[at].handle && table[at].handle != handle) at = (at + 1) & (capacity - 1);
  if (!table[at].handle) used++;
  table[at] = (entry){handle, kind};
  return true;
}

static entry *find(const void *handle) {
  if (!capacity || !handle) return NULL;
  size_t at = place(handle, capacity);
  while (table[at].handle) {
    if (table[at].handle == handle) return &table[at];
    at = (at + 1) & (capacity - 1);
  }
  return NULL;
}

void handle_remove(const void *handle) {
  entry *at = find(handle);
  if (at) at->kind = HANDLE_NONE; /* the key stays, so that chains stay whole */
}

bool handle_is(const void *handle, handle_kind kind) {
  const entry *at = find(handle);
  return at && at->kind == kind;
}
