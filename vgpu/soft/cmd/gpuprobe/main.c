#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

static const char usage_text[] =
    "gpuprobe asks a CUDA driver what a program would see. JSON lines on stdout.\n"
    "\n"
    "  gpuprobe info                          memory by CUDA and NVML of each visible card\n"
    "  gpuprobe alloc SIZE... [--pitch|--managed|--async|--vmm|--legacy|--array]\n"
    "           [--hold [TIME]] [--free-after TIME] [--touch]\n"
    "  gpuprobe fill [--step SIZE] [--least SIZE] [--hold [TIME]]   until it is refused\n"
    "  gpuprobe launch --count N --duration TIME [--streams N] [--blocks N]\n"
    "  gpuprobe load [--for TIME] [--kernels TIME,TIME...] [--streams N] [--seed N] [--sync]\n"
    "           [--burst TIME --think TIME] [--skip TIME --window TIME] [--wait] [--iteration-ps N]\n"
    "           [--rare N | --change TIME] [--capture] [--procs N]   work without end, to see what one gets\n"
    "  gpuprobe chain [--for TIME] [--kernel TIME] [--launches N | --kill-after TIME] [--at-once N] [--wait]\n"
    "                                         short processes one after another, to see what they get together\n"
    "  gpuprobe charges [--random TIME] [--seed N]   what each way to get memory costs, by the driver and by the share\n"
    "  gpuprobe refusals                      one page more than is free is refused, all that is free is had, in each way\n"
    "  gpuprobe costs [--launches]            nanoseconds that carve's library adds to the driver behind it\n"
    "  gpuprobe slices [--for TIME] [--kernel TIME] [--wait]   how long a card stays with one program, beside another\n"
    "  gpuprobe race --procs N --size SIZE --seconds N [--kill]   many processes allocate and free\n"
    "  gpuprobe paths                         which files the loader really opens\n"
    "  gpuprobe symbols [FILE] [--version N]  names (from a file or stdin) by dlsym and cuGetProcAddress\n"
    "  gpuprobe serve [SIZE...]               hold memory, print it each second, obey stdin:\n"
    "           alloc SIZE | managed SIZE | free N | info | launch TIME | unmap FILE | exec PROGRAM... | quit\n"
    "\n"
    "All but paths and symbols take --device N. Sizes: 512B 100KiB 8000MiB 8GiB; times: 20us 2ms 1s.\n"
    "Exit status: 0 fine, 1 something was refused, 2 wrong usage.\n";

int usage(const char *format, ...) {
  va_list arguments;
  fputs("gpuprobe: ", stderr);
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputs("; see gpuprobe help\n", stderr);
  return PROBE_USAGE;
}

const char *take_option(int *argc, char **argv, const char *name) {
  for (int i = 0; i + 1 < *argc; i++) {
    if (strcmp(argv[i], name) != 0) continue;
    const char *value = argv[i + 1];
    memmove(argv + i, argv + i + 2, (size_t)(*argc - i - 2) * sizeof *argv);
    *argc -= 2;
    return value;
  }
  return NULL;
}

bool take_flag(int *argc, char **argv, const char *name) {
  for (int i = 0; i < *argc; i++) {
    if (strcmp(argv[i], name) != 0) continue;
    memmove(argv + i, argv + i + 1, (size_t)(*argc - i - 1) * sizeof *argv);
    *argc -= 1;
    return true;
  }
  return false;
}

int main(int argc, char **argv) {
  static const struct { const char *name; int (*run)(int, char **); } commands[] = {
      {"info", probe_info}, {"alloc", probe_alloc}, {"fill", probe_fill},       {"launch", probe_launch}, {"load", probe_load},
      {"race", probe_race}, {"paths", probe_paths}, {"symbols", probe_symbols}, {"serve", probe_serve},
      {"charges", probe_charges}, {"refusals", probe_refusals}, {"costs", probe_costs}, {"slices", probe_slices}, {"chain", probe_chain},
  };
  if (argc < 2) {
    fputs(usage_text, stderr);
    return PROBE_USAGE;
  }
  if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
    fputs(usage_text, stdout);
    return PROBE_OK;
  }
  for (unsigned i = 0; i < sizeof commands / sizeof commands[0]; i++)
    if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 2, argv + 2);
  return usage("no command %s", argv[1]);
}
