/* MPS: the daemon and its commands, servers, clients and their limits, compute mode, and what dies when. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../state/mps.h"
#include "mps.h"

#define CONTEXT (420 * MIB)
#define SERVER SOFT_SERVER_BYTES

static const mps_wish client = {0}, plain = {.pipe_dir = ""};

static nvmlDevice_t card(unsigned int index) {
  nvmlDevice_t device = NULL;
  NVML(nvmlInit_v2)();
  NVML(nvmlDeviceGetHandleByIndex_v2)(index, &device);
  return device;
}

static nvmlProcessInfo_t rows[64];
static unsigned int listed(bool clients) {
  unsigned int count = 64;
  nvmlReturn_t result = clients ? NVML(nvmlDeviceGetMPSComputeRunningProcesses_v3)(card(0), &count, rows) : NVML(nvmlDeviceGetComputeRunningProcesses_v3)(card(0), &count, rows);
  return result == NVML_SUCCESS ? count : 1000 + (unsigned int)result;
}

static int mode(int wanted) { return NVML(nvmlDeviceSetComputeMode)(card(0), wanted); }

static bool is_not_listed(const void *pid) {
  for (unsigned int i = 0, count = listed(true); i < count && count <= 64; i++)
    if (rows[i].pid == (unsigned int)*(const pid_t *)pid) return false;
  return true;
}

/* ---- scenes: each is a process with a root of its own --------------------- */

static void compute_mode(void) {
  int is = -1, status;
  root_make("--card", "a100-80", "--card", "a30", "--seed", "3", "--free-delay", "0", NULL);
  check_equal(mode(NVML_COMPUTEMODE_EXCLUSIVE_PROCESS), NVML_SUCCESS, "a card is set to one process");
  check(NVML(nvmlDeviceGetComputeMode)(card(0), &is) == NVML_SUCCESS && is == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, "and says so");
  check(NVML(nvmlDeviceGetComputeMode)(card(1), &is) == NVML_SUCCESS && is == NVML_COMPUTEMODE_DEFAULT, "the other one is not");
  child a = mps_child(&plain), b = mps_child(&plain);
  check_equal(mps_do(&a, DO_START, 0), CUDA_SUCCESS, "it has one process");
  check_equal(mps_do(&a, DO_ATTRIBUTE, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE), CU_COMPUTEMODE_EXCLUSIVE_PROCESS, "which is told the mode");
  check(mps_do(&a, DO_ATTRIBUTE, CU_DEVICE_ATTRIBUTE_MPS_ENABLED) == 0 && mps_do(&a, DO_AFFINITY, 0) == 0, "and that there is no MPS");
  check_equal(mps_do(&a, DO_CONTEXT, 10), 1000 + CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY, "so its contexts can't be narrow");
  check_equal(mps_do(&b, DO_START, 0), CUDA_ERROR_DEVICE_UNAVAILABLE, "but no second one");
  check(listed(false) == 1 && listed(true) == 0, "NVML lists it among those that take turns");
  child_kill(&a);
  check_equal(mps_do(&b, DO_START, 0), CUDA_SUCCESS, "until the first is gone");
  mode(NVML_COMPUTEMODE_PROHIBITED);
  check_equal(mps_do(&b, DO_ALLOC, 1), CUDA_SUCCESS, "what is there stays when nobody may come any more");
  child c = mps_child(&plain);
  check_equal(mps_do(&c, DO_START, 0), CUDA_ERROR_DEVICE_UNAVAILABLE, "but nobody comes");
  mode(NVML_COMPUTEMODE_DEFAULT);
  check_equal(mps_do(&c, DO_START, 0), CUDA_SUCCESS, "until all may again");
  check_equal(mode(NVML_COMPUTEMODE_EXCLUSIVE_THREAD), NVML_ERROR_NOT_SUPPORTED, "the mode of old is no more");
  mps_end(&b);
  mps_end(&c);
  char path[600];
  snprintf(path, sizeof path, "%s/usr/lib/x86_64-linux-gnu", state_open()->device_prefix);
  setenv("LD_LIBRARY_PATH", path, 1);
  check_equal(run_tool("nvidia-smi", "-i", "1", "-c", "EXCLUSIVE_PROCESS", NULL), 0, "nvidia-smi sets it");
  char *text = tool_output(&status, "nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader", NULL);
  check(status == 0 && strcmp(text, "Default\nExclusive_Process\n") == 0, "and shows it");
  free(text);
  check_equal(run_tool("nvidia-smi", "-i", "1", "-c", "sometimes", NULL), 2, "there are but three");
}

static void commands(void) {
  int status;
  root_make("--card", "a100-80", "--card", "a30", "--seed", "3", "--free-delay", "0", NULL);
  mps_control(&status, "get_server_list");
  check_equal(status, 1, "without a daemon the control program fails");
  child lone = mps_child(&client);
  check_equal(mps_do(&lone, DO_START, 0), CUDA_SUCCESS, "and a program runs without MPS");
  check_equal(mps_do(&lone, DO_AFFINITY, 0), 0, "as it can tell");
  mps_end(&lone);
  check_equal(mps_daemon_start("CUDA_VISIBLE_DEVICES=0", ""), 0, "a daemon comes up");
  check_equal(mps_daemon_start("CUDA_VISIBLE_DEVICES=0", ""), 1, "one at a place");
  check(strcmp(mps_control(&status, "get_server_list"), "") == 0 && status == 0, "it has no server at first");
  check_equal(listed(false), 0, "and no context");
  child a = mps_child(&client);
  check_equal(mps_do(&a, DO_START, 0), CUDA_SUCCESS, "a client brings one");
  long server = mps_number("get_server_list");
  check(server > 0, "which is listed");
  check(strcmp(mps_control(&status, "get_server_status %ld", server), "ACTIVE\n") == 0 && status == 0, "as active");
  check_equal(mps_number("get_client_list %ld", server), a.pid, "with its client");
  char want[32];
  snprintf(want, sizeof want, "\n%d ", (int)a.pid);
  check(strstr(mps_control(&status, "ps"), want) != NULL, "which ps shows, too");
  check(mps_do(&a, DO_ATTRIBUTE, CU_DEVICE_ATTRIBUTE_MPS_ENABLED) == 1 && mps_do(&a, DO_AFFINITY, 0) == 1, "and which can tell");
  check(listed(false) == 1 && rows[0].pid == (unsigned int)server && rows[0].usedGpuMemory == SERVER, "NVML has the server among those that take turns");
  check(listed(true) == 1 && rows[0].pid == (unsigned int)a.pid && rows[0].usedGpuMemory == CONTEXT, "and the client by itself");
  check_equal(mps_number("start_server -uid 0"), 0, "starting the server that is there changes nothing");
  check_equal(mps_number("get_server_list"), server, "it is the same");
  mps_control(&status, "get_client_list %ld", server + 100000);
  check_equal(status, 1, "a PID of no server is refused");
  mps_control(&status, "make_coffee");
  check_equal(status, 1, "so is another command");
  mps_say(&a, DO_END, 0);
  child_end(&a);
  check(mps_until(is_not_listed, &a.pid), "a client that ends is listed no more");
  check(strcmp(mps_control(&status, "get_client_list %ld", server), "") == 0 && status == 0, "nor by the daemon");
  mps_control(&status, "quit");
  pid_t pid = (pid_t)server;
  check(status == 0 && mps_is_gone(&pid) && mps_daemon_pid() == 0, "quit ends server and daemon before it returns");
  check(used_bytes(0) == 0, "and frees their memory");
}

static void exclusive(void) {
  int status;
  root_make("--card", "a100-80", "--seed", "3", "--free-delay", "0", NULL);
  mode(NVML_COMPUTEMODE_EXCLUSIVE_PROCESS);
  mps_daemon_start("", "");
  child a = mps_child(&client), b = mps_child(&client), other = mps_child(&plain);
  check(mps_do(&a, DO_START, 0) == CUDA_SUCCESS && mps_do(&b, DO_START, 0) == CUDA_SUCCESS, "clients of a server are one process to a card");
  check_equal(mps_do(&other, DO_START, 0), CUDA_ERROR_DEVICE_UNAVAILABLE, "who is none can't use it");
  mps_end(&a);
  mps_end(&b);
  check_equal(mps_do(&other, DO_START, 0), CUDA_ERROR_DEVICE_UNAVAILABLE, "nor when the server has no client");
  long server = mps_number("get_server_list");
  mps_control(&status, "shutdown_server %ld", server);
  pid_t pid = (pid_t)server;
  check(status == 0 && mps_until(mps_is_gone, &pid), "a server is shut down");
  check_equal(mps_do(&other, DO_START, 0), CUDA_SUCCESS, "then it can");
  child c = mps_child(&client);
  check_equal(mps_do(&c, DO_INIT, 0), CUDA_ERROR_MPS_SERVER_NOT_READY, "and now no server can have the card");
  const char *text = mps_control(&status, "start_server -uid 0");
  check(status == 1 && strstr(text, "taken"), "as the daemon says");
  mps_end(&other);
  check_equal(mps_do(&c, DO_START, 0), CUDA_SUCCESS, "until that one is gone; the client may try again");
  mps_end(&c);
  mode(NVML_COMPUTEMODE_PROHIBITED);
  mps_control(NULL, "shutdown_server %ld -f", mps_number("get_server_list"));
  c = mps_child(&client);
  check_equal(mps_do(&c, DO_INIT, 0), CUDA_ERROR_MPS_SERVER_NOT_READY, "a prohibited card has no server");
  mps_end(&c);
  mode(NVML_COMPUTEMODE_DEFAULT);
  a = mps_child(&client), other = mps_child(&plain);
  check(mps_do(&a, DO_START, 0) == CUDA_SUCCESS && mps_do(&other, DO_START, 0) == CUDA_SUCCESS, "in the default mode both can");
  mps_end(&a);
  mps_end(&other);
}

static uint64_t multiprocessors(const char *percentage) {
  mps_wish w = {.percentage = percentage};
  child c = mps_child(&w);
  uint64_t count = mps_do(&c, DO_START, 0) == CUDA_SUCCESS ? mps_do(&c, DO_ATTRIBUTE, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) : UINT64_MAX;
  mps_end(&c);
  return count;
}

static void percentages(void) {
  int status;
  root_make("--card", "a100-80", "--seed", "3", "--free-delay", "0", NULL);
  mps_daemon_start("", "");
  check(strcmp(mps_control(&status, "get_default_active_thread_percentage"), "100.0\n") == 0 && status == 0, "at first all threads");
  check_equal(multiprocessors(NULL), 108, "all multiprocessors");
  check_equal(multiprocessors("25"), 27, "a client may ask for less");
  check_equal(multiprocessors("12.5"), 13, "in whole ones, rounded down");
  check_equal(multiprocessors("0.1"), 1, "at least one");
  check(multiprocessors("0") == 108 && multiprocessors("101") == 108 && multiprocessors("x") == 108, "what is no percentage says nothing");
  long server = mps_number("get_server_list");
  check(strcmp(mps_control(&status, "set_default_active_thread_percentage 50"), "50.0\n") == 0 && status == 0, "the default is set");
  check_equal(multiprocessors(NULL), 108, "for servers to come");
  check(strcmp(mps_control(&status, "get_active_thread_percentage %ld", server), "100.0\n") == 0, "that one has its own");
  check(strcmp(mps_control(&status, "set_active_thread_percentage %ld 75.5", server), "75.5\n") == 0, "which can be set");
  child early = mps_child(&client);
  mps_do(&early, DO_START, 0);
  check_equal(mps_do(&early, DO_ATTRIBUTE, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 81, "for clients to come");
  mps_control(&status, "set_active_thread_percentage %ld 10", server);
  check_equal(mps_do(&early, DO_ATTRIBUTE, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 81, "not for those that are there");
  check_equal(mps_do(&early, DO_CONTEXT, 20), 20, "a context can have less than its process");
  check_equal(mps_do(&early, DO_CONTEXT, 100), 81, "never more");
  mps_end(&early);
  check(multiprocessors("50") == 10 && multiprocessors("5") == 5, "the smaller of the two counts");
  mps_control(&status, "set_default_active_thread_percentage 0");
  check_equal(status, 1, "none at all is refused");
  mps_control(&status, "set_default_active_thread_percentage 100.5");
  check_equal(status, 1, "so is more than all");
  mps_control(NULL, "shutdown_server %ld", server);
  check_equal(multiprocessors(NULL), 54, "the next server has the default");
}

static void memory(void) {
  int status;
  root_make("--card", "a100-80", "--card", "a30", "--seed", "3", "--free-delay", "0", NULL);
  mps_daemon_start("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=1=1G", "");
  check(strcmp(mps_control(&status, "get_default_device_pinned_mem_limit 1"), "1G\n") == 0 && status == 0, "the environment's limit");
  mps_control(&status, "set_default_device_pinned_mem_limit 0 2G");
  check(status == 0 && strcmp(mps_control(&status, "get_default_device_pinned_mem_limit 0"), "2G\n") == 0, "and one that was set");
  child a = mps_child(&client);
  check_equal(mps_do(&a, DO_START, 0), CUDA_SUCCESS, "a client below it starts");
  check_equal(mps_do(&a, DO_ALLOC, 2048 - 420), CUDA_SUCCESS, "and can have the rest of it, its context counted");
  check_equal(mps_do(&a, DO_ALLOC, 2), CUDA_ERROR_OUT_OF_MEMORY, "to the page");
  child b = mps_child(&(mps_wish){.limits = "0=1G"});
  check(mps_do(&b, DO_START, 0) == CUDA_SUCCESS && mps_do(&b, DO_ALLOC, 1024 - 420) == CUDA_SUCCESS && mps_do(&b, DO_ALLOC, 2) == CUDA_ERROR_OUT_OF_MEMORY, "its own limit counts where it is smaller");
  child c = mps_child(&(mps_wish){.limits = "0=8G"});
  check(mps_do(&c, DO_START, 0) == CUDA_SUCCESS && mps_do(&c, DO_ALLOC, 1700) == CUDA_ERROR_OUT_OF_MEMORY, "and not where it is larger");
  child d = mps_child(&(mps_wish){.limits = "0=100M"});
  check_equal(mps_do(&d, DO_START, 0), CUDA_ERROR_OUT_OF_MEMORY, "a context that is over it isn't made");
  char named[64];
  snprintf(named, sizeof named, "%s=1G", soft_card_at(state_open(), 0)->facts.uuid);
  child e = mps_child(&(mps_wish){.limits = named});
  check(mps_do(&e, DO_START, 0) == CUDA_SUCCESS && mps_do(&e, DO_ALLOC, 700) == CUDA_ERROR_OUT_OF_MEMORY, "a card may be named by its UUID");
  child f = mps_child(&(mps_wish){.cards = "1"});
  check(mps_do(&f, DO_START, 0) == CUDA_SUCCESS && mps_do(&f, DO_ALLOC, 1024) == CUDA_ERROR_OUT_OF_MEMORY, "each card has its own");
  long server = mps_number("get_server_list");
  mps_control(&status, "set_device_pinned_mem_limit %ld 0 3G", server);
  check(status == 0 && strcmp(mps_control(&status, "get_device_pinned_mem_limit %ld 0", server), "3G\n") == 0, "a server's limit is set");
  check_equal(mps_do(&a, DO_ALLOC, 2), CUDA_ERROR_OUT_OF_MEMORY, "for clients to come");
  mps_control(&status, "set_default_device_pinned_mem_limit 7 1G");
  check_equal(status, 1, "a card that isn't there is refused");
  child *const all[] = {&a, &b, &c, &d, &e, &f};
  for (int i = 0; i < 6; i++) mps_end(all[i]);
}

static void many(void) {
  static child all[48];
  int good = 0;
  root_make("--card", "a100-80x2", "--seed", "3", "--free-delay", "0", NULL);
  mps_daemon_start("", "");
  mps_wish first = {.cards = "0"};
  for (int i = 0; i < 48; i++) {
    all[i] = mps_child(&first);
    good += mps_do(&all[i], DO_START, 0) == CUDA_SUCCESS;
  }
  check_equal(good, 48, "a card has 48 clients");
  child more = mps_child(&first), other = mps_child(&(mps_wish){.cards = "1"});
  check_equal(mps_do(&more, DO_INIT, 0), CUDA_ERROR_MPS_MAX_CLIENTS_REACHED, "and no more");
  check_equal(mps_do(&other, DO_START, 0), CUDA_SUCCESS, "another card has its own");
  child_kill(&all[7]);
  check_equal(mps_do(&more, DO_START, 0), CUDA_SUCCESS, "who dies makes room");
  all[7] = more;
  for (int i = 0; i < 48; i++) mps_end(&all[i]);
  mps_end(&other);
}

static void shared_memory(void) {
  root_make("--card", "a100-80", "--seed", "3", "--free-delay", "0", NULL);
  mps_daemon_start("", "");
  child blind = mps_child(&(mps_wish){.own_shm = true}), seeing = mps_child(&client);
  check_equal(mps_do(&blind, DO_INIT, 0), CUDA_ERROR_MPS_CONNECTION_FAILED, "without the server's /dev/shm there is no connection");
  check_equal(mps_do(&seeing, DO_START, 0), CUDA_SUCCESS, "with it there is");
  mps_end(&blind);
  mps_end(&seeing);
}

static void users(void) {
  int status;
  root_make("--card", "a100-80", "--seed", "3", "--free-delay", "0", NULL);
  mps_daemon_start("", "");
  child a = mps_child(&client), b = mps_child(&(mps_wish){.uid = 1234});
  mps_do(&a, DO_START, 0);
  pid_t first = (pid_t)mps_number("get_server_list");
  mps_say(&b, DO_INIT, 0);
  nap_ms(200); /* it must not come in meanwhile: the check is on the server, below */
  check(mps_number("get_server_list") == first && mps_number("get_client_list %d", first) == a.pid, "another user's client waits");
  mps_end(&a);
  check_equal(ask(&b), CUDA_SUCCESS, "until the first user's are gone");
  pid_t second = (pid_t)mps_number("get_server_list");
  check(second != first && mps_is_gone(&first), "and has a server of its own");
  mps_end(&b);
  mps_control(&status, "quit");
  mps_daemon_start("", "-multiuser-server");
  a = mps_child(&client), b = mps_child(&(mps_wish){.uid = 1234});
  check(mps_do(&a, DO_START, 0) == CUDA_SUCCESS && mps_do(&b, DO_START, 0) == CUDA_SUCCESS, "a server for all has both at once");
  check_equal(listed(true), 2, "as NVML shows");
  mps_end(&a);
  mps_end(&b);
}

typedef void (*scene)(void);

static int run(scene play) {
  int status = 0;
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    play();
    mps_clear();
    exit(finish() ? 3 : 0);
  }
  waitpid(pid, &status, 0);
  return status;
}

int main(void) {
  static const scene scenes[] = {compute_mode, commands, exclusive, percentages, memory, many, shared_memory, users};
  int bad = 0;
  for (unsigned int i = 0; i < sizeof scenes / sizeof scenes[0]; i++) bad += run(scenes[i]) != 0;
  check(bad == 0, "all scenes came to their end");
  return finish();
}
