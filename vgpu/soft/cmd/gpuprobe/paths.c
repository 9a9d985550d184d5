/*
 * paths.c - which files the loader really opens.
 *
 * Each way of loading is tried in a process of its own. The answer comes from
 * the memory map around the object that the loader opened, not from the name
 * that was asked for, nor from one of its functions: those may come from a
 * library that it depends on.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "probe.h"

typedef struct { const char *base, *entry; } library;
static const library libraries[] = {{"libcuda", "cuInit"}, {"libnvidia-ml", "nvmlInit_v2"}};

/* The line of /proc/self/maps around an address: file, inode. */
static bool map_at(const void *address, char *file, size_t size, unsigned long *inode) {
  char row[4096];
  FILE *maps = fopen("/proc/self/maps", "re");
  bool found = false;
  while (maps && !found && fgets(row, sizeof row, maps)) {
    unsigned long from, to;
    int at = 0;
    if (sscanf(row, "%lx-%lx %*s %*s %*s %lu %n", &from, &to, inode, &at) != 3) continue;
    if ((unsigned long)address < from || (unsigned long)address >= to) continue;
    row[strcspn(row, "\n")] = 0;
    snprintf(file, size, "%s", row + at);
    found = true;
  }
  if (maps) fclose(maps);
  return found;
}

/* The object behind a handle: its name to the loader, and an address in it. */
static const struct link_map *object(void *handle) {
  struct link_map *map = NULL;
  return handle && dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map : NULL;
}

static int report(const char *way, const char *asked, const library *of, void *handle) {
  char file[4096] = "", *reason = handle ? NULL : dlerror();
  unsigned long inode = 0;
  void *entry = handle ? dlsym(handle, of->entry) : NULL;
  const struct link_map *map = object(handle);
  line("path");
  field_bool("ok", entry != NULL);
  field_text("library", of->base);
  field_text("way", way);
  field_text("asked", asked);
  if (entry && map) {
    if (map_at(map->l_ld, file, sizeof file, &inode)) {
      field_text("file", file);
      field_number("inode", inode);
    }
    field_text("loader", map->l_name);
  } else if (reason) {
    field_text("reason", reason);
  }
  line_end();
  return entry ? PROBE_OK : PROBE_REFUSED;
}

/* DIR/libcuda.so.550.90.07 beside the file that the name gives. */
static bool versioned_path(const library *of, char *out, size_t size) {
  char name[64], prefix[64], where[4096] = "";
  unsigned long inode;
  snprintf(name, sizeof name, "%s.so.1", of->base);
  snprintf(prefix, sizeof prefix, "%s.so.", of->base);
  const struct link_map *map = object(dlopen(name, RTLD_LAZY));
  if (!map) return false;
  if (strchr(map->l_name, '/')) snprintf(where, sizeof where, "%s", map->l_name);
  else if (!map_at(map->l_ld, where, sizeof where, &inode)) return false;
  char *slash = strrchr(where, '/');
  if (!slash) return false;
  *slash = 0;
  DIR *dir = opendir(where[0] ? where : "/");
  bool found = false;
  for (struct dirent *at; dir && !found && (at = readdir(dir));) {
    if (strncmp(at->d_name, prefix, strlen(prefix)) != 0 || !strchr(at->d_name + strlen(prefix), '.')) continue;
    snprintf(out, size, "%s/%s", where, at->d_name);
    found = true;
  }
  if (dir) closedir(dir);
  return found;
}

static int one(const char *way, const library *of) {
  char name[4096];
  void *handle;
  snprintf(name, sizeof name, "%s.so.1", of->base);
  if (strcmp(way, "name") == 0 || strcmp(way, "cleared-environment") == 0) return report(way, name, of, dlopen(name, RTLD_NOW));
  if (strcmp(way, "unversioned") == 0) {
    snprintf(name, sizeof name, "%s.so", of->base);
    return report(way, name, of, dlopen(name, RTLD_NOW));
  }
  if (strcmp(way, "noload") == 0) {
    dlopen(name, RTLD_NOW);
    return report(way, name, of, dlopen(name, RTLD_NOW | RTLD_NOLOAD));
  }
  if (strcmp(way, "reopened") == 0) {
    handle = dlopen(name, RTLD_NOW);
    if (handle) dlclose(handle);
    return report(way, name, of, dlopen(name, RTLD_NOW));
  }
  if (strcmp(way, "versioned") == 0) {
    char self[4096] = "";
    int ends[2];
    /* the path is looked up in a child, so that this process opens nothing before it */
    if (pipe(ends) != 0) return PROBE_REFUSED;
    pid_t pid = fork();
    if (pid == 0) {
      if (versioned_path(of, self, sizeof self)) (void)!write(ends[1], self, strlen(self));
      _exit(0);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], name, sizeof name - 1);
    close(ends[0]);
    waitpid(pid, NULL, 0);
    if (n <= 0) return report(way, "no versioned file found", of, NULL);
    name[n] = 0;
    return report(way, name, of, dlopen(name, RTLD_NOW));
  }
  return usage("no way %s", way);
}

static int in_child(const char *way, unsigned int which, bool cleared) {
  char number[8], *argv[] = {"gpuprobe", "paths", "--one", (char *)way, number, NULL}, *empty[] = {NULL};
  extern char **environ;
  int status = 0;
  snprintf(number, sizeof number, "%u", which);
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    execve("/proc/self/exe", argv, cleared ? empty : environ);
    _exit(PROBE_REFUSED);
  }
  if (pid < 0 || waitpid(pid, &status, 0) != pid) return PROBE_REFUSED;
  return WIFEXITED(status) ? WEXITSTATUS(status) : PROBE_REFUSED;
}

int probe_paths(int argc, char **argv) {
  static const char *const ways[] = {"name", "unversioned", "versioned", "noload", "reopened", "cleared-environment"};
  if (argc == 3 && strcmp(argv[0], "--one") == 0) {
    unsigned int which = (unsigned int)atoi(argv[2]);
    return which < sizeof libraries / sizeof libraries[0] ? one(argv[1], &libraries[which]) : PROBE_USAGE;
  }
  if (argc) return usage("paths takes no arguments");
  int code = PROBE_OK;
  for (unsigned int l = 0; l < sizeof libraries / sizeof libraries[0]; l++)
    for (unsigned int w = 0; w < sizeof ways / sizeof ways[0]; w++) {
      /* NVIDIA's packages bring no unversioned libnvidia-ml.so */
      if (l == 1 && strcmp(ways[w], "unversioned") == 0) continue;
      int result = in_child(ways[w], l, strcmp(ways[w], "cleared-environment") == 0);
      if (result != PROBE_OK) code = result;
    }
  return code;
}
