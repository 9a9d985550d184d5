/*
 * visible.c - CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
 *
 * The list is read up to the first entry that names no card, as the driver
 * does: "0,7,1" on four cards gives one. An entry is an index or a UUID, whole
 * or its unambiguous beginning. A card named twice ends in no card at all.
 */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static uint64_t speed(const soft_card *card) { return (uint64_t)card->facts.sm_count * card->facts.cores_per_sm * card->facts.sm_clock_mhz; }

static uint64_t bus_place(const soft_card *card) {
  return (uint64_t)card->facts.pci_domain << 32 | card->facts.pci_bus << 8 | card->facts.pci_device;
}

static bool before(const soft_region *region, uint32_t a, uint32_t b, bool by_bus) {
  const soft_card *first = soft_card_at(region, a), *second = soft_card_at(region, b);
  if (!by_bus && speed(first) != speed(second)) return speed(first) > speed(second);
  return bus_place(first) < bus_place(second);
}

/* Index into cards[] that the entry names, or -1. */
static int named(const soft_region *region, const uint32_t *cards, uint32_t count, const char *text, size_t length) {
  if (length >= 5 && memcmp(text, "GPU-", 4) == 0) {
    int match = -1;
    for (uint32_t i = 0; i < count; i++) {
      if (strncmp(soft_card_at(region, cards[i])->facts.uuid, text, length) != 0) continue;
      if (match >= 0) return -1;
      match = (int)i;
    }
    return match;
  }
  char digits[16];
  if (!length || length >= sizeof digits) return -1;
  memcpy(digits, text, length);
  digits[length] = 0;
  char *end;
  long index = strtol(digits, &end, 10);
  return *end || end == digits || index < 0 || (unsigned long)index >= count ? -1 : (int)index;
}

void visible_devices(driver *d, const bool *reachable, const char *wish, const char *order) {
  uint32_t cards[SOFT_CARDS], count = 0;
  bool by_bus = order && strcmp(order, "PCI_BUS_ID") == 0;

  for (uint32_t i = 0; i < soft_card_count(&d->region); i++) {
    if (!reachable[i]) continue;
    uint32_t at = count++;
    while (at > 0 && before(&d->region, i, cards[at - 1], by_bus)) {
      cards[at] = cards[at - 1];
      at--;
    }
    cards[at] = i;
  }
  if (!wish) {
    memcpy(d->cards, cards, sizeof cards);
    d->device_count = count;
    return;
  }
  d->device_count = 0;
  while (*wish) {
    while (*wish == ' ') wish++;
    size_t length = strcspn(wish, ",");
    size_t trimmed = length;
    while (trimmed && wish[trimmed - 1] == ' ') trimmed--;
    int index = named(&d->region, cards, count, wish, trimmed);
    if (index < 0) return;
    for (uint32_t i = 0; i < d->device_count; i++)
      if (d->cards[i] == cards[index]) {
        d->device_count = 0;
        return;
      }
    d->cards[d->device_count++] = cards[index];
    wish += length + (wish[length] == ',');
  }
}
