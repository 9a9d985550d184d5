/*
 * nodes.c - stand-in device nodes.
 *
 * A node must really gate: a container that was not given its number can't
 * open it. So each card gets a character device number of its own that exists
 * on this machine, is outside of what container runtimes allow by default
 * (null, zero, full, random, urandom, tty, ptmx, pts, and tun in old ones),
 * and can be opened without anything happening. What the machine has differs,
 * so candidates are tried.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "softgpu.h"

enum { MOST = 256 };

/* In order of preference. */
static int candidates(device_number *out) {
  int n = 0;
  /* screen contents of virtual consoles: text, attributes, unicode */
  for (uint32_t minor = 0; minor < 8; minor++)
    for (uint32_t kind = 0; kind < 3; kind++) out[n++] = (device_number){7, minor + kind * 64};
  /* cpuid of each processor */
  for (uint32_t cpu = 0; cpu < 16; cpu++) out[n++] = (device_number){203, cpu};
  /* loop-control, btrfs-control, autofs: nothing happens before an ioctl */
  out[n++] = (device_number){10, 237};
  out[n++] = (device_number){10, 234};
  out[n++] = (device_number){10, 235};
  /* virtual consoles: an open one is allocated, no more */
  for (uint32_t tty = 63; tty >= 8; tty--) out[n++] = (device_number){4, tty};
  out[n++] = (device_number){10, 229}; /* fuse; some runtimes allow it */
  return n;
}

static bool opens(const char *path) {
  int fd = open(path, O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return false;
  close(fd);
  return true;
}

static int make(const char *root, const char *name, const device_number *number) {
  char path[4096];
  snprintf(path, sizeof path, "%s/dev/%s", root, name);
  unlink(path);
  if (mknod(path, S_IFCHR | 0666, makedev(number->major, number->minor)) != 0 || chmod(path, 0666) != 0)
    return complain(EXIT_FAILED, "make device node %s: %s", path, strerror(errno));
  return EXIT_OK;
}

int make_nodes(const char *root, soft_header *header, device_number numbers[3]) {
  device_number all[MOST], good[SOFT_CARDS + 3];
  char path[4096], name[32];
  int have = 0, need = (int)header->card_count + 3, count = candidates(all);

  snprintf(path, sizeof path, "%s/dev/.probe", root);
  for (int i = 0; i < count && have < need; i++) {
    unlink(path);
    if (mknod(path, S_IFCHR | 0600, makedev(all[i].major, all[i].minor)) != 0)
      return complain(EXIT_FAILED, "make device node %s: %s", path, strerror(errno));
    if (opens(path)) good[have++] = all[i];
    else if (errno == EACCES && have == 0 && i == count - 1) break;
  }
  unlink(path);
  if (have < need)
    return complain(EXIT_FAILED, "%s: only %d of %d stand-in device nodes could be opened (is the file system mounted nodev?)", root, have, need);
  for (uint32_t i = 0; i < header->card_count; i++) {
    soft_card_facts *facts = &header->cards[i].facts;
    facts->node_major = good[i].major;
    facts->node_minor = good[i].minor;
    snprintf(name, sizeof name, "nvidia%u", facts->minor);
    int code = make(root, name, &good[i]);
    if (code != EXIT_OK) return code;
  }
  static const char *const others[3] = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"};
  for (int i = 0; i < 3; i++) {
    numbers[i] = good[header->card_count + (uint32_t)i];
    int code = make(root, others[i], &numbers[i]);
    if (code != EXIT_OK) return code;
  }
  return EXIT_OK;
}
