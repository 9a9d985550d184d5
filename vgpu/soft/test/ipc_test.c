/* Memory and events of other processes: whose bytes, who pays, until when. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../state/lock.h"
#include "../state/objects.h"
#include "harness.h"

#define CONTEXT (420 * MIB)

/* What the processes of a scene hand each other besides numbers. */
typedef struct {
  CUipcMemHandle memory[2];
  CUipcEventHandle event;
  CUmemPoolPtrExportData pointer;
} board;
static board *shared;
static int wire[2]; /* descriptors travel here, written by one process and read by the next */

static void send_descriptor(int descriptor) {
  _Alignas(struct cmsghdr) char room[CMSG_SPACE(sizeof(int))];
  char byte = 'd';
  struct iovec part = {&byte, 1};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
  memset(room, 0, sizeof room);
  struct cmsghdr *head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
  if (sendmsg(wire[0], &message, 0) != 1) _exit(9);
}

static int receive_descriptor(void) {
  _Alignas(struct cmsghdr) char room[CMSG_SPACE(sizeof(int))];
  char byte;
  int descriptor = -1;
  struct iovec part = {&byte, 1};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
  if (recvmsg(wire[1], &message, 0) != 1) _exit(9);
  struct cmsghdr *head = CMSG_FIRSTHDR(&message);
  if (head) memcpy(&descriptor, CMSG_DATA(head), sizeof descriptor);
  return descriptor;
}

/* What a process pays for on card 0, contexts apart. */
static uint64_t pays(const child *c) {
  soft_region *region = state_open();
  uint64_t bytes = 0;
  used_bytes(0);
  for (uint32_t i = 0; i < soft_slots_high(region); i++) {
    const soft_slot *slot = soft_slot_at(region, i);
    if (slot->kind == SOFT_KIND_CUDA && slot->state == SOFT_SLOT_LIVE && slot->pid == (uint32_t)c->pid) bytes += slot->usage[0].memory_bytes;
  }
  return bytes;
}

static bool word_is(CUdeviceptr at, uint64_t want) {
  uint64_t got = 0;
  return CUDA(cuMemcpyDtoH_v2)(&got, at, 8) == CUDA_SUCCESS && got == want;
}

static CUresult write_word(CUdeviceptr at, uint64_t value) { return CUDA(cuMemcpyHtoD_v2)(at, &value, 8); }

/* Children obey numbers until the other end closes. */
typedef struct { uint64_t what; uint64_t (*run)(void); } order;
static void obey(child *self, const order *orders) {
  tell(self, (uint64_t)start_cuda(0));
  for (;;) {
    uint64_t what = ask(self);
    if (what == UINT64_MAX) return;
    const order *o = orders;
    while (o->run && o->what != what) o++;
    tell(self, o->run ? o->run() : UINT64_MAX - 1);
  }
}
static uint64_t do_it(child *c, uint64_t what) {
  tell(c, what);
  return ask(c);
}

/* ---- legacy handles ------------------------------------------------------ */

enum { MAKE = 1, READ_BACK, OPEN_OWN, FREE, OPEN, OPEN_TWICE, READ_AND_WRITE, CLOSE, CLOSE_AGAIN, OPEN_LATE, FILL, LOOK, END };
static CUdeviceptr small, large, opened[2];

static uint64_t make(void) {
  CUDA(cuMemAlloc_v2)(&small, 3000);
  CUDA(cuMemAlloc_v2)(&large, 5 * MIB);
  write_word(small + 2992, 1111);
  write_word(large + 4 * MIB, 2222);
  CUresult result = CUDA(cuIpcGetMemHandle)(&shared->memory[0], small + 100);
  return (uint64_t)(result ? result : CUDA(cuIpcGetMemHandle)(&shared->memory[1], large));
}
static uint64_t read_back(void) { return word_is(small, 3333) && word_is(small + 2992, 1111) && word_is(large + 8, 4444); }
static uint64_t open_own(void) { return (uint64_t)CUDA(cuIpcOpenMemHandle_v2)(&opened[0], shared->memory[0], 1); }
static uint64_t free_both(void) { return (uint64_t)(CUDA(cuMemFree_v2)(small) | CUDA(cuMemFree_v2)(large)); }
static uint64_t open_both(void) {
  CUresult result = CUDA(cuIpcOpenMemHandle_v2)(&opened[0], shared->memory[0], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  return (uint64_t)(result ? result : CUDA(cuIpcOpenMemHandle_v2)(&opened[1], shared->memory[1], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
}
static uint64_t open_twice(void) {
  CUdeviceptr again = 0;
  CUDA(cuIpcOpenMemHandle_v2)(&again, shared->memory[1], 0);
  return again == opened[1] && CUDA(cuIpcCloseMemHandle)(again) == CUDA_SUCCESS;
}
static uint64_t read_and_write(void) {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  bool good = word_is(opened[0] + 2992, 1111) && word_is(opened[1] + 4 * MIB, 2222);
  good &= write_word(opened[0], 3333) == CUDA_SUCCESS && write_word(opened[1] + 8, 4444) == CUDA_SUCCESS;
  good &= write_word(opened[0] + 2993, 0) == CUDA_ERROR_INVALID_VALUE && write_word(opened[1] + 5 * MIB, 0) == CUDA_ERROR_INVALID_VALUE;
  good &= CUDA(cuMemGetAddressRange_v2)(&base, &bytes, opened[0] + 5) == CUDA_SUCCESS && base == opened[0] && bytes == 3000;
  return good && CUDA(cuMemFree_v2)(opened[0]) == CUDA_ERROR_INVALID_VALUE;
}
static uint64_t close_both(void) { return (uint64_t)(CUDA(cuIpcCloseMemHandle)(opened[0]) | CUDA(cuIpcCloseMemHandle)(opened[1])); }
static uint64_t close_again(void) { return (uint64_t)CUDA(cuIpcCloseMemHandle)(opened[0]); }
static uint64_t open_late(void) { return (uint64_t)CUDA(cuIpcOpenMemHandle_v2)(&opened[0], shared->memory[0], 1); }
static uint64_t fill_large(void) { return (uint64_t)CUDA(cuMemsetD32_v2)(opened[1], 7, 5 * MIB / 4); }
static uint64_t look_large(void) { return word_is(opened[1] + 5 * MIB - 8, 0x0000000700000007ull); }
static const order legacy_orders[] = {{MAKE, make}, {READ_BACK, read_back}, {OPEN_OWN, open_own}, {FREE, free_both}, {OPEN, open_both},
                                      {OPEN_TWICE, open_twice}, {READ_AND_WRITE, read_and_write}, {CLOSE, close_both},
                                      {CLOSE_AGAIN, close_again}, {OPEN_LATE, open_late}, {FILL, fill_large}, {LOOK, look_large}, {0, NULL}};
static void legacy_child(child *self, void *unused) {
  (void)unused;
  obey(self, legacy_orders);
}

static void legacy(void) {
  child a = child_start(legacy_child, NULL), b = child_start(legacy_child, NULL);
  ask(&a);
  ask(&b);
  check_equal(do_it(&a, MAKE), CUDA_SUCCESS, "a process makes handles of its memory");
  uint64_t held = used_bytes(0) - 2 * CONTEXT;
  check_equal(held, 8 * MIB, "which costs what it cost before");
  check_equal(do_it(&a, OPEN_OWN), CUDA_ERROR_INVALID_CONTEXT, "it can't open them itself");
  check_equal(do_it(&b, OPEN), CUDA_SUCCESS, "another process does");
  check(used_bytes(0) == 2 * CONTEXT + held && pays(&a) == held && pays(&b) == 0, "at no cost: the owner pays");
  check_equal(do_it(&b, OPEN_TWICE), 1, "a second opening gives the same address, and is closed by itself");
  check_equal(do_it(&b, READ_AND_WRITE), 1, "it sees the bytes, writes others, and gets no further than the allocation");
  check_equal(do_it(&a, READ_BACK), 1, "which the owner sees");
  check_equal(do_it(&b, CLOSE), CUDA_SUCCESS, "it closes them");
  check_equal(do_it(&b, CLOSE_AGAIN), CUDA_ERROR_INVALID_VALUE, "once");
  check_equal(do_it(&b, OPEN), CUDA_SUCCESS, "and opens them again");
  check_equal(do_it(&a, FREE), CUDA_SUCCESS, "the owner frees what the other has open");
  check(used_bytes(0) == 2 * CONTEXT + held && pays(&a) == 0 && pays(&b) == held, "it stays, and who has it open pays");
  check_equal(do_it(&b, FILL), CUDA_SUCCESS, "and can still use it");
  check_equal(do_it(&b, LOOK), 1, "as said");
  check_equal(do_it(&b, CLOSE), CUDA_SUCCESS, "until it closes it");
  check_equal(used_bytes(0), 2 * CONTEXT, "then it is free");
  check_equal(do_it(&b, OPEN_LATE), CUDA_ERROR_INVALID_HANDLE, "and its handle is no more");
  memset(&shared->memory[0], 0x5a, sizeof shared->memory[0]);
  check_equal(do_it(&b, OPEN_LATE), CUDA_ERROR_INVALID_VALUE, "noise is no handle");

  do_it(&a, MAKE);
  do_it(&b, OPEN);
  child_kill(&a);
  check(used_bytes(0) == CONTEXT + held && pays(&b) == held, "when the owner dies, it stays too");
  child_kill(&b);
  check_equal(used_bytes(0), 0, "and goes with the last");
}

/* ---- shareable handles --------------------------------------------------- */

enum { CREATE = 100, EXPORT_IT, RELEASE, IMPORT, MAP, CHECK_WORD, UNMAP, CLOSE_FD, RECEIVE, WRONG, EXPORT_AND_CLOSE, IMPORT_NOISE };
static CUmemGenericAllocationHandle handle;
static CUdeviceptr range;
static int descriptor = -1;

static const CUmemAllocationProp shareable = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                              .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static uint64_t create(void) { return (uint64_t)CUDA(cuMemCreate)(&handle, 6 * MIB, &shareable, 0); }
static uint64_t export_it(void) {
  int made = -1;
  CUresult result = CUDA(cuMemExportToShareableHandle)(&made, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result == CUDA_SUCCESS) send_descriptor(made);
  close(made);
  return (uint64_t)result;
}
static uint64_t release_it(void) { return (uint64_t)CUDA(cuMemRelease)(handle); }
static uint64_t receive(void) { return (descriptor = receive_descriptor()) >= 0; }
static uint64_t import(void) {
  return (uint64_t)CUDA(cuMemImportFromShareableHandle)(&handle, (void *)(intptr_t)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}
static uint64_t map(void) {
  CUmemAccessDesc access = {.location = shareable.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUDA(cuMemAddressReserve)(&range, 6 * MIB, 0, 0, 0);
  CUDA(cuMemMap)(range, 4 * MIB, 2 * MIB, handle, 0);
  return (uint64_t)CUDA(cuMemSetAccess)(range, 4 * MIB, &access, 1);
}
static uint64_t check_word(void) {
  bool before = word_is(range + 3 * MIB, 987654321);
  write_word(range + 3 * MIB, 987654321);
  return before;
}
static uint64_t unmap(void) { return (uint64_t)CUDA(cuMemUnmap)(range, 4 * MIB); }
static uint64_t close_fd(void) { return (uint64_t)close(descriptor); }
static uint64_t wrong(void) {
  CUmemAllocationProp plain = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}}, fabric = plain;
  CUmemGenericAllocationHandle other;
  int made;
  fabric.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
  bool good = CUDA(cuMemCreate)(&other, 2 * MIB, &fabric, 0) == CUDA_ERROR_NOT_SUPPORTED;
  good &= CUDA(cuMemCreate)(&other, 2 * MIB, &plain, 0) == CUDA_SUCCESS;
  good &= CUDA(cuMemExportToShareableHandle)(&made, other, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_ERROR_INVALID_VALUE;
  return good && CUDA(cuMemRelease)(other) == CUDA_SUCCESS;
}
static uint64_t import_noise(void) {
  int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  CUmemGenericAllocationHandle other;
  bool good = CUDA(cuMemImportFromShareableHandle)(&other, (void *)(intptr_t)null, 1) == CUDA_ERROR_INVALID_VALUE;
  good &= CUDA(cuMemImportFromShareableHandle)(&other, (void *)(intptr_t)9999, 1) == CUDA_ERROR_INVALID_VALUE;
  close(null);
  return good && CUDA(cuMemImportFromShareableHandle)(&other, (void *)(intptr_t)descriptor, 2) == CUDA_ERROR_INVALID_VALUE;
}
static const order handle_orders[] = {{CREATE, create}, {EXPORT_IT, export_it}, {RELEASE, release_it}, {RECEIVE, receive}, {IMPORT, import},
                                      {MAP, map}, {CHECK_WORD, check_word}, {UNMAP, unmap}, {CLOSE_FD, close_fd}, {WRONG, wrong},
                                      {IMPORT_NOISE, import_noise}, {0, NULL}};
static void handle_child(child *self, void *unused) {
  (void)unused;
  obey(self, handle_orders);
}

static void handles(void) {
  child a = child_start(handle_child, NULL), b = child_start(handle_child, NULL), c = child_start(handle_child, NULL);
  child *all[] = {&a, &b, &c};
  for (int i = 0; i < 3; i++) ask(all[i]);
  uint64_t contexts = 3 * CONTEXT;
  check_equal(do_it(&a, WRONG), 1, "a handle that wasn't made to be shared isn't, and there is no fabric");
  check_equal(do_it(&a, CREATE), CUDA_SUCCESS, "a handle that was");
  check_equal(used_bytes(0), contexts + 6 * MIB, "is charged from its creation");
  do_it(&a, MAP);
  do_it(&a, CHECK_WORD);
  check_equal(do_it(&a, EXPORT_IT), CUDA_SUCCESS, "it goes out as a descriptor");
  check_equal(do_it(&b, RECEIVE), 1, "another process gets that");
  check_equal(do_it(&b, IMPORT_NOISE), 1, "which takes no other descriptor for one");
  check_equal(do_it(&b, IMPORT), CUDA_SUCCESS, "and imports it");
  do_it(&b, CLOSE_FD);
  check(used_bytes(0) == contexts + 6 * MIB && pays(&a) == 6 * MIB && pays(&b) == 0, "at no cost: the owner pays");
  do_it(&b, MAP);
  check_equal(do_it(&b, CHECK_WORD), 1, "it sees the owner's bytes");
  do_it(&a, RELEASE);
  check_equal(pays(&a), 6 * MIB, "the owner pays while it maps what it released");
  do_it(&a, UNMAP);
  check(used_bytes(0) == contexts + 6 * MIB && pays(&a) == 0 && pays(&b) == 6 * MIB, "then the importer pays");
  do_it(&b, RELEASE);
  check_equal(pays(&b), 6 * MIB, "while it maps it");
  do_it(&b, UNMAP);
  check_equal(used_bytes(0), contexts, "and then it is free");

  /* a descriptor that nobody imported */
  do_it(&a, CREATE);
  do_it(&a, EXPORT_IT);
  do_it(&a, RELEASE);
  check_equal(used_bytes(0), contexts + 6 * MIB, "a descriptor under way keeps the memory");
  do_it(&c, RECEIVE);
  child_kill(&a);
  contexts -= CONTEXT;
  check(used_bytes(0) == contexts + 6 * MIB && pays(&b) == 0 && pays(&c) == 0, "also when its maker dies: the card counts it, nobody pays");
  check_equal(do_it(&c, IMPORT), CUDA_SUCCESS, "it can still be imported");
  check_equal(pays(&c), 6 * MIB, "and then the importer pays");
  do_it(&c, RELEASE);
  check_equal(used_bytes(0), contexts + 6 * MIB, "an import that is released leaves the descriptor");
  do_it(&c, CLOSE_FD);
  check_equal(used_bytes(0), contexts, "with the descriptor it goes");
  do_it(&b, CREATE);
  do_it(&b, EXPORT_IT);
  child_kill(&b);
  do_it(&c, RECEIVE);
  check_equal(used_bytes(0), CONTEXT + 6 * MIB, "memory in the hands of one that never imports it");
  child_kill(&c);
  check_equal(used_bytes(0), 0, "goes when that one dies");
}

/* ---- pools ---------------------------------------------------------------- */

enum { POOL_MAKE = 200, POOL_EXPORT, POOL_FREE, POOL_DESTROY, POOL_IMPORT, POOL_POINTER, POOL_CHECK, POOL_GIVE };
static CUmemoryPool pool;
static CUdeviceptr pooled;

static uint64_t pool_make(void) {
  CUmemPoolProps p = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
  CUDA(cuMemPoolCreate)(&pool, &p);
  CUDA(cuMemAllocFromPoolAsync)(&pooled, 1000, pool, NULL);
  CUDA(cuMemAllocFromPoolAsync)(&pooled, MIB, pool, NULL);
  write_word(pooled + 8, 5555);
  return (uint64_t)CUDA(cuMemPoolExportPointer)(&shared->pointer, pooled);
}
static uint64_t pool_export(void) {
  int made = -1;
  CUresult result = CUDA(cuMemPoolExportToShareableHandle)(&made, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result == CUDA_SUCCESS) send_descriptor(made);
  close(made);
  return (uint64_t)result;
}
static uint64_t pool_import(void) {
  int got = receive_descriptor();
  CUresult result = CUDA(cuMemPoolImportFromShareableHandle)(&pool, (void *)(intptr_t)got, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  close(got);
  return (uint64_t)result;
}
static uint64_t pool_pointer(void) { return (uint64_t)CUDA(cuMemPoolImportPointer)(&pooled, pool, &shared->pointer); }
static uint64_t pool_check(void) {
  CUdeviceptr other;
  return word_is(pooled + 8, 5555) && CUDA(cuMemAllocFromPoolAsync)(&other, 512, pool, NULL) == CUDA_ERROR_INVALID_VALUE;
}
static uint64_t pool_give(void) { return (uint64_t)CUDA(cuMemFreeAsync)(pooled, NULL); }
static uint64_t pool_free(void) {
  CUDA(cuMemFreeAsync)(pooled, NULL);
  return (uint64_t)CUDA(cuCtxSynchronize)();
}
static uint64_t pool_destroy(void) { return (uint64_t)CUDA(cuMemPoolDestroy)(pool); }
static const order pool_orders[] = {{POOL_MAKE, pool_make}, {POOL_EXPORT, pool_export}, {POOL_IMPORT, pool_import}, {POOL_POINTER, pool_pointer},
                                    {POOL_CHECK, pool_check}, {POOL_GIVE, pool_give}, {POOL_FREE, pool_free}, {POOL_DESTROY, pool_destroy}, {0, NULL}};
static void pool_child(child *self, void *unused) {
  (void)unused;
  obey(self, pool_orders);
}

static void pools(void) {
  child a = child_start(pool_child, NULL), b = child_start(pool_child, NULL);
  ask(&a);
  ask(&b);
  check_equal(do_it(&a, POOL_MAKE), CUDA_SUCCESS, "a pool that can be shared, and a pointer of it for others");
  check(used_bytes(0) == 2 * CONTEXT + 32 * MIB && pays(&a) == 32 * MIB, "charged by what it reserves");
  check_equal(do_it(&a, POOL_EXPORT), CUDA_SUCCESS, "it goes out");
  check_equal(do_it(&b, POOL_IMPORT), CUDA_SUCCESS, "and comes in");
  check_equal(do_it(&b, POOL_POINTER), CUDA_SUCCESS, "with the pointer");
  check_equal(do_it(&b, POOL_CHECK), 1, "which shows the bytes; nothing is allocated from another's pool");
  check(used_bytes(0) == 2 * CONTEXT + 32 * MIB && pays(&b) == 0, "at no cost: the owner pays");
  check_equal(do_it(&b, POOL_DESTROY), CUDA_ERROR_INVALID_VALUE, "the import stays while a pointer of it is in use");
  check_equal(do_it(&b, POOL_GIVE), CUDA_SUCCESS, "the pointer is freed");
  check_equal(do_it(&b, POOL_GIVE), CUDA_ERROR_INVALID_VALUE, "once");
  check_equal(do_it(&b, POOL_DESTROY), CUDA_SUCCESS, "and then the import");
  check(used_bytes(0) == 2 * CONTEXT + 32 * MIB && pays(&a) == 32 * MIB, "the owner has it all the same");
  child_kill(&a);
  check_equal(used_bytes(0), CONTEXT, "until it ends");
  child_kill(&b);
}

/* ---- external memory ------------------------------------------------------ */

enum { EXT_IMPORT = 300, EXT_BUFFER, EXT_ARRAY, EXT_DESTROY, EXT_CHECK, EXT_FREE, EXT_ARRAY_GONE };
static CUexternalMemory outside;
static CUmipmappedArray outside_array;

static uint64_t ext_import(void) {
  CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle.fd = receive_descriptor(), .size = 8 * MIB};
  if (CUDA(cuImportExternalMemory)(&outside, &d) != CUDA_ERROR_INVALID_VALUE) return UINT64_MAX; /* larger than it is */
  d.size = 6 * MIB;
  CUresult result = CUDA(cuImportExternalMemory)(&outside, &d);
  return result == CUDA_SUCCESS && fcntl(d.handle.fd, F_GETFD) == -1 ? 1 : 0;
}
static uint64_t ext_buffer(void) {
  CUDA_EXTERNAL_MEMORY_BUFFER_DESC d = {.offset = 5 * MIB, .size = 2 * MIB};
  if (CUDA(cuExternalMemoryGetMappedBuffer)(&pooled, outside, &d) != CUDA_ERROR_INVALID_VALUE) return UINT64_MAX;
  d.size = MIB;
  return (uint64_t)CUDA(cuExternalMemoryGetMappedBuffer)(&pooled, outside, &d);
}
static uint64_t ext_check(void) { return word_is(pooled, 987654321) && write_word(pooled + MIB, 1) == CUDA_ERROR_INVALID_VALUE; }
static uint64_t ext_array(void) {
  CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC d = {.offset = 0, .arrayDesc = {1024, 1024, 0, CU_AD_FORMAT_FLOAT, 1, 0}, .numLevels = 1};
  CUarray level;
  uint64_t word = 42, back = 0;
  CUresult result = CUDA(cuExternalMemoryGetMappedMipmappedArray)(&outside_array, outside, &d);
  if (result != CUDA_SUCCESS) return (uint64_t)result;
  CUDA(cuMipmappedArrayGetLevel)(&level, outside_array, 0);
  CUDA_MEMCPY2D up = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = &word, .dstMemoryType = CU_MEMORYTYPE_ARRAY, .dstArray = level, .dstY = 1000,
                      .WidthInBytes = 8, .Height = 1};
  CUDA_MEMCPY2D down = {.srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = level, .srcY = 1000, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = &back,
                        .WidthInBytes = 8, .Height = 1};
  CUDA(cuMemcpy2D_v2)(&up);
  CUDA(cuMemcpy2D_v2)(&down);
  return back == 42 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}
static uint64_t ext_destroy(void) { return (uint64_t)CUDA(cuDestroyExternalMemory)(outside); }
static uint64_t ext_free(void) { return (uint64_t)CUDA(cuMemFree_v2)(pooled); }
static uint64_t ext_array_gone(void) { return (uint64_t)CUDA(cuMipmappedArrayDestroy)(outside_array); }
static const order external_orders[] = {{EXT_IMPORT, ext_import}, {EXT_BUFFER, ext_buffer}, {EXT_CHECK, ext_check}, {EXT_ARRAY, ext_array},
                                        {EXT_DESTROY, ext_destroy}, {EXT_FREE, ext_free}, {EXT_ARRAY_GONE, ext_array_gone}, {0, NULL}};
static void external_child(child *self, void *unused) {
  (void)unused;
  obey(self, external_orders);
}

static void external(void) {
  child a = child_start(handle_child, NULL), b = child_start(external_child, NULL);
  ask(&a);
  ask(&b);
  do_it(&a, CREATE);
  do_it(&a, MAP);
  do_it(&a, CHECK_WORD); /* at 2 MiB + 3 MiB of the handle */
  do_it(&a, EXPORT_IT);
  check_equal(do_it(&b, EXT_IMPORT), 1, "external memory comes in, not larger than it is, and takes its descriptor");
  check(used_bytes(0) == 2 * CONTEXT + 6 * MIB && pays(&b) == 0, "at no cost: the owner pays");
  check_equal(do_it(&b, EXT_BUFFER), CUDA_SUCCESS, "a part of it is mapped");
  check_equal(do_it(&b, EXT_CHECK), 1, "and shows the owner's bytes");
  check_equal(do_it(&b, EXT_ARRAY), CUDA_SUCCESS, "as is an array over it");
  child_kill(&a);
  check(used_bytes(0) == CONTEXT + 6 * MIB && pays(&b) == 6 * MIB, "when the owner dies, the importer pays");
  do_it(&b, EXT_DESTROY);
  check_equal(used_bytes(0), CONTEXT + 6 * MIB, "mappings outlive the import");
  check_equal(do_it(&b, EXT_FREE), CUDA_SUCCESS, "the buffer is freed");
  check_equal(used_bytes(0), CONTEXT + 6 * MIB, "the array has it still");
  check_equal(do_it(&b, EXT_ARRAY_GONE), CUDA_SUCCESS, "until that goes");
  check_equal(used_bytes(0), CONTEXT, "and then it is free");
  child_kill(&b);
}

/* ---- storm ---------------------------------------------------------------- */

/* Makes, opens, frees and closes at random until it is killed. */
static void restless(child *self, void *argument) {
  unsigned int seed = (unsigned int)(uintptr_t)argument;
  CUdeviceptr mine[4] = {0}, theirs[4] = {0};
  tell(self, (uint64_t)start_cuda(0));
  for (;;) {
    unsigned int which = (unsigned int)rand_r(&seed) % 4, slot = (unsigned int)rand_r(&seed) % 2;
    switch (rand_r(&seed) % 4) {
    case 0:
      if (!mine[which] && CUDA(cuMemAlloc_v2)(&mine[which], rand_r(&seed) % 2 ? 4096 : 3 * MIB) != CUDA_SUCCESS) mine[which] = 0;
      if (mine[which]) CUDA(cuIpcGetMemHandle)(&shared->memory[slot], mine[which]);
      break;
    case 1:
      if (mine[which]) CUDA(cuMemFree_v2)(mine[which]);
      mine[which] = 0;
      break;
    case 2: {
      CUipcMemHandle copy = shared->memory[slot]; /* torn at times, as another writes it: then it must be refused */
      if (!theirs[which] && CUDA(cuIpcOpenMemHandle_v2)(&theirs[which], copy, 1) != CUDA_SUCCESS) theirs[which] = 0;
      if (theirs[which]) write_word(theirs[which], 1);
      break;
    }
    default:
      if (theirs[which]) CUDA(cuIpcCloseMemHandle)(theirs[which]);
      theirs[which] = 0;
    }
  }
}

static void storm(void) {
  enum { MANY = 4, ROUNDS = 6 };
  child all[MANY];
  int failed = 0;
  for (int i = 0; i < MANY; i++) {
    all[i] = child_start(restless, (void *)(uintptr_t)(i + 1));
    failed += ask(&all[i]) != CUDA_SUCCESS;
  }
  for (int round = 0; round < ROUNDS * MANY; round++) {
    int i = round % MANY;
    nap_ms(10);
    child_kill(&all[i]);
    all[i] = child_start(restless, (void *)(uintptr_t)(round + 100));
    failed += ask(&all[i]) != CUDA_SUCCESS;
    used_bytes(0);
  }
  soft_region *region = state_open();
  if (soft_lock(region, 10000) == SOFT_OK) {
    uint64_t sum = 0, unpaid = 0;
    for (uint32_t i = 0; i < soft_slots_high(region); i++) {
      const soft_usage *usage = &soft_slot_at(region, i)->usage[0];
      if (soft_slot_at(region, i)->state == SOFT_SLOT_LIVE || soft_slot_at(region, i)->state == SOFT_SLOT_DEAD)
        sum += usage->context_bytes + usage->memory_bytes;
    }
    for (uint32_t i = 0; i < soft_objects_high(region); i++) {
      const soft_object *object = soft_object_seen(region, i);
      if (object && object->payer == SOFT_NO_INDEX) unpaid += object->bytes;
    }
    check_equal(soft_card_at(region, 0)->used_bytes, sum + unpaid, "in the midst of it the card's sum is that of all processes");
    soft_unlock(region);
  }
  for (int i = 0; i < MANY; i++) child_kill(&all[i]);
  check_equal(failed, 0, "processes come and go by kill -9 with each other's memory open");
  check_equal(used_bytes(0), 0, "after them nothing is held");
  uint32_t left = 0;
  for (uint32_t i = 0; i < soft_objects_high(region); i++) left += soft_object_seen(region, i) != NULL;
  check_equal(left, 0, "and nothing is left in the table");
}

/* ---- events ---------------------------------------------------------------- */

static uint64_t clock_ns(void) { return ((uint64_t (*)(void))entry(cuda_library(), "softgpu_clock_ns"))(); }
static void leave_clock(void) { ((int (*)(void))entry(cuda_library(), "softgpu_clock_leave"))(); }
static void join_clock(void) { ((int (*)(void))entry(cuda_library(), "softgpu_clock_join"))(); }

static void recorder(child *self, void *unused) {
  CUevent event, plain;
  CUdeviceptr none = 0;
  uint64_t ns = 10000000;
  void *parameters[] = {&ns, &none};
  (void)unused;
  start_cuda(0);
  CUDA(cuEventCreate)(&plain, CU_EVENT_DISABLE_TIMING);
  CUDA(cuEventCreate)(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
  tell(self, (uint64_t)CUDA(cuIpcGetEventHandle)(&shared->event, plain));
  CUDA(cuLaunchKernel)(kernel("carve_spin"), 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL);
  CUDA(cuEventRecord)(event, NULL);
  tell(self, (uint64_t)CUDA(cuIpcGetEventHandle)(&shared->event, event));
  leave_clock(); /* from here on the other one drives the time */
  ask(self);
  join_clock();
  tell(self, (uint64_t)CUDA(cuEventQuery)(event));
  leave_clock();
  ask(self);
}

static void waiter(child *self, void *unused) {
  CUevent event;
  CUstream stream;
  (void)unused;
  tell(self, (uint64_t)start_cuda(0));
  ask(self); /* a member that computes: time stands until the event is there */
  tell(self, (uint64_t)CUDA(cuIpcOpenEventHandle)(&event, shared->event));
  uint64_t start = clock_ns();
  tell(self, (uint64_t)CUDA(cuEventQuery)(event));
  CUDA(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING);
  CUDA(cuStreamWaitEvent)(stream, event, 0);
  tell(self, (uint64_t)CUDA(cuStreamQuery)(stream));
  CUDA(cuEventSynchronize)(event);
  tell(self, clock_ns() - start);
  tell(self, (uint64_t)CUDA(cuEventQuery)(event));
  CUDA(cuStreamSynchronize)(stream);
  tell(self, clock_ns() - start);
  /* the other way round: recorded here, known there */
  tell(self, (uint64_t)CUDA(cuEventRecord)(event, NULL));
  leave_clock();
  ask(self);
  CUDA(cuEventDestroy_v2)(event);
}

static void events(void) {
  root_make("--card", "a100-80", "--seed", "4", "--clock", "virtual", "--free-delay", "0", NULL);
  child b = child_start(waiter, NULL);
  check_equal(ask(&b), CUDA_SUCCESS, "one process starts");
  child a = child_start(recorder, NULL);
  check_equal(ask(&a), CUDA_ERROR_INVALID_VALUE, "an event that wasn't made for other processes isn't");
  check_equal(ask(&a), CUDA_SUCCESS, "one that was has a handle");
  tell(&b, 1);
  check_equal(ask(&b), CUDA_SUCCESS, "another process opens it");
  check_equal(ask(&b), CUDA_ERROR_NOT_READY, "while the kernel before it runs it isn't done");
  check_equal(ask(&b), CUDA_ERROR_NOT_READY, "nor is a stream that waits for it");
  check_equal(ask(&b), 10000000, "waiting for it takes as long as that kernel");
  check_equal(ask(&b), CUDA_SUCCESS, "then it is done");
  check_equal(ask(&b), 10000000, "and so is the stream");
  check_equal(ask(&b), CUDA_SUCCESS, "the one who opened it records it too");
  tell(&a, 1);
  check_equal(ask(&a), CUDA_SUCCESS, "which its maker sees");
  tell(&b, 0);
  check_equal(child_end(&b), 0, "and both end well");
  tell(&a, 0);
  check_equal(child_end(&a), 0, "as said");
}

int main(void) {
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM, 0, wire) != 0) return 1;
  pid_t pid = fork(); /* a root of its own, and its own look at the state */
  if (pid == 0) {
    events();
    fflush(stdout);
    root_remove();
    _exit(0);
  }
  int status = 0;
  check(waitpid(pid, &status, 0) == pid && status == 0, "events came to their end");
  root_make("--card", "a100-80x2", "--seed", "3", "--free-delay", "0", NULL);
  legacy();
  handles();
  pools();
  external();
  storm();
  return finish();
}
