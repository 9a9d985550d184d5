/*
 * charges.c - is what a share is charged what the driver takes, and is its limit exact, in each way to get memory?
 *
 * True of any driver if carve's library is right. A line has figures and no verdict: whoever runs it compares.
 */
#include <stdlib.h>
#include <string.h>

#include "../units.h"
#include "probe.h"

#define MIB ((uint64_t)1 << 20)

static void figure_fields(const char *process, const char *card, const char *charged, figures before, figures after) {
  if (before.process_known && after.process_known) field_signed(process, (int64_t)(after.process_bytes - before.process_bytes));
  field_signed(card, (int64_t)(after.card_bytes - before.card_bytes));
  if (before.charged_known && after.charged_known) field_signed(charged, (int64_t)(after.charged_bytes - before.charged_bytes));
}

static int context_line(void) {
  figures f = figures_now();
  line("context");
  field_bool("ok", true);
  if (f.process_known) field_number("processBytes", f.process_bytes);
  field_number("cardBytes", f.card_bytes);
  if (f.charged_known) field_number("chargedBytes", f.charged_bytes);
  line_end();
  return PROBE_OK;
}

/* Sizes on both sides of what is thought to be the driver's steps. */
static int each_size(int device) {
  static const uint64_t sizes[] = {1, 512, 513, 4096, 65536, 65537, 1 * MIB - 1, 1 * MIB, 1 * MIB + 1, 2 * MIB, 2 * MIB + 1, 3 * MIB,
                                   16 * MIB, 32 * MIB, 33 * MIB + 1, 100 * MIB + 12345, 512 * MIB};
  for (way by = BY_ALLOC; by < WAYS; by++) {
    if (by == BY_LEGACY) continue; /* the driver's 32-bit entries aren't for addresses of these days */
    for (unsigned int i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
      piece one;
      figures before = figures_now();
      CUresult result = take_piece(by, sizes[i], device, &one);
      figures during = figures_now(), after = during;
      CUresult given = result;
      if (result == CUDA_SUCCESS) {
        given = give_piece(&one);
        after = figures_now();
      }
      line("charge");
      field_result(result != CUDA_SUCCESS ? result : given);
      field_text("call", way_name(by));
      field_number("askedBytes", sizes[i]);
      figure_fields("processBytes", "cardBytes", "chargedBytes", before, during);
      figure_fields("processBytesAfter", "cardBytesAfter", "chargedBytesAfter", before, after);
      line_end();
    }
  }
  return PROBE_OK;
}

/* Random calls. Both figures are compared after each. */
static int at_random(int device, uint64_t for_ns, uint64_t seed) {
  enum { LIVE = 300 };
  static piece held[LIVE];
  static bool live[LIVE];
  figures first = figures_now(), now = first;
  uint64_t calls = 0, disagree = 0, refusals = 0, end = wall_ns() + for_ns, first_bad = 0, strange = 0;
  int64_t over = 0, under = 0;
  srandom((unsigned int)seed);
  while (wall_ns() < end) {
    unsigned int at = (unsigned int)random() % LIVE;
    if (live[at]) {
      strange += give_piece(&held[at]) != CUDA_SUCCESS;
      live[at] = false;
    } else {
      unsigned int what = (unsigned int)random() % 100;
      way by = what < 80 ? BY_ALLOC : what < 90 ? BY_PITCH : BY_VMM;
      uint64_t bytes = 1 + (uint64_t)random() % (what < 45 ? 60000 : what < 60 ? 3 * MIB : 40 * MIB);
      CUresult result = take_piece(by, bytes, device, &held[at]);
      live[at] = result == CUDA_SUCCESS;
      refusals += result == CUDA_ERROR_OUT_OF_MEMORY;
      strange += result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY;
    }
    calls++;
    now = figures_now();
    int64_t driver = now.process_known ? (int64_t)(now.process_bytes - first.process_bytes) : (int64_t)(now.card_bytes - first.card_bytes);
    int64_t off = (int64_t)(now.charged_bytes - first.charged_bytes) - driver;
    if (off > over) over = off;
    if (-off > under) under = -off;
    if (off && !disagree++) first_bad = calls;
  }
  for (unsigned int i = 0; i < LIVE; i++)
    if (live[i]) strange += give_piece(&held[i]) != CUDA_SUCCESS;
  figures last = figures_now();
  line("random");
  field_bool("ok", strange == 0);
  field_bool("processKnown", now.process_known);
  field_bool("chargedKnown", now.charged_known);
  field_number("calls", calls);
  field_number("refusals", refusals);
  field_number("strangeAnswers", strange);
  field_number("disagreements", disagree);
  field_number("firstDisagreement", first_bad);
  field_signed("chargedOverBytes", over);
  field_signed("chargedUnderBytes", under);
  figure_fields("processBytesAfter", "cardBytesAfter", "chargedBytesAfter", first, last);
  line_end();
  return strange ? PROBE_REFUSED : PROBE_OK;
}

int probe_charges(int argc, char **argv) {
  uint64_t device = 0, for_ns = 0, seed = 1;
  const char *option;
  if ((option = take_option(&argc, argv, "--device")) && (!units_number(option, &device) || device > 64)) return usage("--device can't be %s", option);
  if ((option = take_option(&argc, argv, "--random")) && (!units_nanoseconds(option, &for_ns) || !for_ns)) return usage("--random can't be %s", option);
  if ((option = take_option(&argc, argv, "--seed")) && !units_number(option, &seed)) return usage("--seed can't be %s", option);
  if (argc) return usage("charges takes no %s", argv[0]);
  int code = open_device((int)device);
  if (code == PROBE_OK) code = open_figures((int)device);
  if (code == PROBE_OK) code = context_line();
  if (code != PROBE_OK) return code;
  return for_ns ? at_random((int)device, for_ns, seed) : each_size((int)device);
}

/* ---- refusals ---- */

static uint64_t free_bytes(void) {
  size_t left = 0, total = 0;
  return cuda.cuMemGetInfo_v2(&left, &total) == CUDA_SUCCESS ? left : 0;
}

int probe_refusals(int argc, char **argv) {
  static const way ways[] = {BY_ALLOC, BY_PITCH, BY_MANAGED, BY_VMM, BY_ARRAY, BY_ASYNC};
  uint64_t device = 0;
  const char *option;
  if ((option = take_option(&argc, argv, "--device")) && (!units_number(option, &device) || device > 64)) return usage("--device can't be %s", option);
  if (argc) return usage("refusals takes no %s", argv[0]);
  int code = open_device((int)device);
  if (code == PROBE_OK) code = open_figures((int)device);
  if (code == PROBE_OK) code = context_line();
  if (code != PROBE_OK) return code;
  for (unsigned int w = 0; w < sizeof ways / sizeof ways[0]; w++) {
    way by = ways[w];
    /* An array's tiles and a pool's steps are the driver's. */
    uint64_t step = by == BY_ASYNC ? 32 * MIB : 2 * MIB;
    uint64_t left = free_bytes();
    figures before = figures_now();
    piece over, all;
    CUresult refusal = take_piece(by, left / step * step + step, (int)device, &over);
    figures after = figures_now();
    uint64_t left_after = free_bytes();
    bool untouched = refusal == CUDA_SUCCESS || (over.pointer == 0 && over.handle == 0 && over.array == NULL);
    if (refusal == CUDA_SUCCESS) give_piece(&over);

    /* A pitch is rounded up, so a row of 1000 bytes has 1024 or more. */
    uint64_t most = left / step * step, asked = by == BY_PITCH ? most / 2 : by == BY_ARRAY ? most / 10 * 9 : most;
    CUresult granted = take_piece(by, asked, (int)device, &all);
    figures full = figures_now();
    uint64_t left_full = free_bytes();
    if (granted == CUDA_SUCCESS) give_piece(&all);
    uint64_t left_last = free_bytes();
    figures last = figures_now();
    line("refusal");
    field_result(refusal);
    field_text("call", way_name(by));
    field_number("freeBytes", left);
    field_bool("outputsUntouched", untouched);
    field_signed("freeChangedBytes", (int64_t)(left_after - left));
    figure_fields("processBytes", "cardBytes", "chargedBytes", before, after);
    field_number("askedOfFreeBytes", asked);
    field_signed("grantResult", granted);
    field_number("freeBytesFull", left_full);
    if (full.process_known) field_number("processBytesFull", full.process_bytes);
    if (full.charged_known) field_number("chargedBytesFull", full.charged_bytes);
    field_signed("freeChangedBytesLast", (int64_t)(left_last - left));
    figure_fields("processBytesLast", "cardBytesLast", "chargedBytesLast", before, last);
    line_end();
  }
  return PROBE_OK;
}
