#include "kernels.h"

#include <string.h>

#include "managed.h"

/* The text that the known kernels have, as the build laid it in. */
__asm__(".section .rodata\n"
        "soft_kernel_text:\n"
        ".incbin \"" SOFT_KERNEL_FILE "\"\n"
        ".byte 0\n"
        ".previous\n");
extern const char soft_kernel_text[] __attribute__((visibility("hidden")));

/* What a launch has the card for at least. */
enum { LEAST_NS = 1000 };

static uint64_t bytes_ns(const soft_card *card, uint64_t bytes) {
  uint64_t per_us = 2ull * card->facts.mem_clock_mhz * card->facts.bus_width_bits / 8; /* two transfers a clock */
  if (!per_us) per_us = 1;
  unsigned __int128 ns = (unsigned __int128)bytes * 1000 / per_us;
  return LEAST_NS + (ns > UINT64_MAX / 2 ? UINT64_MAX / 2 : (uint64_t)ns);
}

static CUresult run_empty(const kernel_arguments *a, const kernel_grid *g) {
  (void)a;
  (void)g;
  return CUDA_SUCCESS;
}

static uint64_t empty_ns(const kernel_arguments *a, const kernel_grid *g) {
  (void)a;
  (void)g;
  return LEAST_NS;
}

/* The value that the loop in the text ends with: x -> 1664525 x + 1013904223, applied n times by squaring. */
static uint32_t turned(uint32_t x, uint64_t n) {
  uint32_t mul = 1664525u, add = 1013904223u, all_mul = 1, all_add = 0;
  for (; n; n >>= 1) {
    if (n & 1) {
      all_mul *= mul;
      all_add = all_add * mul + add;
    }
    add *= mul + 1;
    mul *= mul;
  }
  return x * all_mul + all_add;
}

/* What a kernel on a card sees there; managed memory comes to the card for it. */
static void *card_view(const kernel_grid *g, CUdeviceptr pointer, uint64_t bytes, bool write) {
  managed_touch((uint32_t)(g->card - the_driver.region.state->header.cards), pointer, bytes);
  return memory_card_view(pointer, bytes, write);
}

static CUresult run_spin(const kernel_arguments *a, const kernel_grid *g) {
  if (!a->value[1]) return CUDA_SUCCESS;
  uint32_t *out = card_view(g, a->value[1], sizeof *out, true);
  if (!out || !is_device_address(a->value[1])) return CUDA_ERROR_ILLEGAL_ADDRESS;
  *out = turned(1, a->value[0]);
  return CUDA_SUCCESS;
}

static uint64_t spin_ns(const kernel_arguments *a, const kernel_grid *g) {
  (void)g;
  return a->value[0];
}

static CUresult run_fill(const kernel_arguments *a, const kernel_grid *g) {
  uint64_t count = a->value[2];
  if (!count) return CUDA_SUCCESS;
  if (count > UINT64_MAX / 4) return CUDA_ERROR_ILLEGAL_ADDRESS;
  uint32_t *words = card_view(g, a->value[0], count * 4, true);
  if (!words) return CUDA_ERROR_ILLEGAL_ADDRESS;
  for (uint64_t i = 0; i < count; i++) words[i] = (uint32_t)a->value[1];
  return CUDA_SUCCESS;
}

static uint64_t fill_ns(const kernel_arguments *a, const kernel_grid *g) { return bytes_ns(g->card, a->value[2] * 4); }

static CUresult run_vecadd(const kernel_arguments *a, const kernel_grid *g) {
  uint64_t count = a->value[3];
  if (!count) return CUDA_SUCCESS;
  if (count > UINT64_MAX / 4) return CUDA_ERROR_ILLEGAL_ADDRESS;
  const float *x = card_view(g, a->value[0], count * 4, false), *y = card_view(g, a->value[1], count * 4, false);
  float *z = card_view(g, a->value[2], count * 4, true);
  if (!x || !y || !z) return CUDA_ERROR_ILLEGAL_ADDRESS;
  for (uint64_t i = 0; i < count; i++) z[i] = x[i] + y[i];
  return CUDA_SUCCESS;
}

static uint64_t vecadd_ns(const kernel_arguments *a, const kernel_grid *g) { return bytes_ns(g->card, a->value[3] * 12); }

static const kernel kernels[] = {
    {"carve_empty", run_empty, empty_ns},
    {"carve_spin", run_spin, spin_ns},
    {"carve_fill", run_fill, fill_ns},
    {"carve_vecadd", run_vecadd, vecadd_ns},
};

const kernel *kernel_for(const ptx_entry *entry) {
  static ptx_image known; /* read once, under the process lock */
  if (!known.entry_count && ptx_read(soft_kernel_text, &known) != CUDA_SUCCESS) return NULL;
  for (size_t i = 0; i < known.entry_count; i++) {
    if (strcmp(known.entries[i].name, entry->name) != 0 || known.entries[i].text_hash != entry->text_hash) continue;
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++)
      if (strcmp(kernels[k].name, entry->name) == 0) return &kernels[k];
  }
  return NULL;
}
