/*
 * softgpu - makes, shows, changes and removes software GPUs.
 *
 * A test instrument: what it makes looks like a driver root with cards, and is
 * memory and arithmetic. It says so wherever it says anything.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softgpu.h"

static const char usage_text[] =
    "softgpu makes a software GPU: a driver root with libraries, device nodes and /proc\n"
    "files, and a shared state in place of cards. For tests only.\n"
    "\n"
    "  softgpu init ROOT --card MODEL[xN] [--card ...]   make a root\n"
    "      --driver 550.90.07   version (default); the branch decides what is exported\n"
    "      --seed N             the same UUIDs each time\n"
    "      --clock real|virtual --free-delay 200ms --quantum 2ms --switch 20us\n"
    "      --links default|none|switch|pairs   --numa NODES\n"
    "  softgpu show ROOT [-o table|json]     what the cards hold and who holds it\n"
    "  softgpu set ROOT [--card N] NAME=VALUE...\n"
    "      of the node: clock free-delay quantum switch\n"
    "      of the cards (all, or the one named): context compute-mode persistence\n"
    "      accounting temperature\n"
    "      stacks (percent of one for each thread that can be resident, 100 at first)\n"
    "      stacks-stay (0|1: lower ones give nothing back)\n"
    "  softgpu fault ROOT [--card N] KIND\n"
    "      lost | restore | xid CODE | alloc-fail COUNT | nvml-delay TIME [CALL] |\n"
    "      ecc-corrected N | ecc-uncorrected N | remap-pending 0|1 | remap-failed 0|1\n"
    "  softgpu watch ROOT [--every 5ms] [--for TIME]   note at once when processes end\n"
    "  softgpu models                        the models that there are\n"
    "  softgpu destroy ROOT                  remove what init made\n"
    "\n"
    "Exit status: 0 done, 1 failed, 2 wrong usage.\n";

int complain(int code, const char *format, ...) {
  va_list arguments;
  fputs("softgpu (software GPU): ", stderr);
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  return code;
}

int root_open(const char *root, soft_region *region) {
  char dir[4096];
  if (snprintf(dir, sizeof dir, "%s/softgpu", root) >= (int)sizeof dir) return complain(EXIT_FAILED, "%s: path too long", root);
  soft_error error = soft_region_open(region, dir, root);
  if (error == SOFT_OK && !soft_region_sound(region)) error = SOFT_EBADSTATE;
  if (error == SOFT_OK) error = soft_slot_claim(region, SOFT_KIND_OBSERVER);
  if (error == SOFT_OK) error = soft_lock(region, 5000);
  if (error == SOFT_OK) return EXIT_OK;
  if (error == SOFT_ESYSTEM) return complain(EXIT_FAILED, "open %s: %s", dir, strerror(errno));
  return complain(EXIT_FAILED, "open %s: %s", dir, soft_error_text(error));
}

void root_close(soft_region *region) {
  soft_unlock(region);
  soft_slot_release(region);
}

int command_models(int argc, char **argv) {
  (void)argv;
  if (argc) return complain(EXIT_USAGE, "models takes no arguments");
  printf("%-12s %-46s %10s %9s %4s %s\n", "MODEL", "NAME (software GPU)", "TOTAL MiB", "CUDA MiB", "SM", "CONTEXT MiB");
  for (unsigned i = 0; soft_model_at(i); i++) {
    const soft_model *m = soft_model_at(i);
    printf("%-12s %-46s %10u %9u %4u %u\n", m->key, m->name, m->total_mib, m->total_mib - m->reserved_mib, m->sm_count, m->context_mib);
  }
  return EXIT_OK;
}

int main(int argc, char **argv) {
  static const struct { const char *name; int (*run)(int, char **); } commands[] = {
      {"init", command_init}, {"destroy", command_destroy}, {"show", command_show},     {"set", command_set},
      {"fault", command_fault}, {"watch", command_watch},   {"models", command_models},
  };
  if (argc < 2) {
    fputs(usage_text, stderr);
    return EXIT_USAGE;
  }
  if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
    fputs(usage_text, stdout);
    return EXIT_OK;
  }
  for (unsigned i = 0; i < sizeof commands / sizeof commands[0]; i++)
    if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 2, argv + 2);
  complain(EXIT_USAGE, "no command %s; see softgpu help", argv[1]);
  return EXIT_USAGE;
}
