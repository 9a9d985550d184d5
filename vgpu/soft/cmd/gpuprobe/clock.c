/* The clock that programs work by: the software GPU's, behind carve's front too, or the machine's. */
#include <dlfcn.h>

#include "probe.h"

static uint64_t (*soft_clock_ns)(void);
static int (*soft_sleep_until_ns)(uint64_t);
static int (*soft_clock_leave)(void);

void find_clock(void) {
  void *driver = dlopen("/usr/lib/carve/driver/libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver) driver = cuda.handle;
  *(void **)&soft_clock_ns = dlsym(driver, "softgpu_clock_ns");
  *(void **)&soft_sleep_until_ns = dlsym(driver, "softgpu_sleep_until_ns");
  *(void **)&soft_clock_leave = dlsym(driver, "softgpu_clock_leave");
}

bool on_soft_clock(void) { return soft_clock_ns != NULL; }

uint64_t now_ns(void) { return soft_clock_ns ? soft_clock_ns() : wall_ns(); }

void sleep_until(uint64_t until) {
  uint64_t now = now_ns();
  if (until <= now) return;
  if (soft_sleep_until_ns) soft_sleep_until_ns(until);
  else nap_ns(until - now);
}

void leave_clock(void) {
  if (soft_clock_leave) soft_clock_leave();
}
