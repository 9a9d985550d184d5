// Package softclock is the software GPU's clock, for tests of what must agree with
// it about time: with a virtual clock, time stands while any member works, and
// passes at once when all wait. A process that opens it is a program on the
// software GPU like any other, and a member of its clock with one thread.
package softclock

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

struct door {
	void *library;
	int (*init)(unsigned int);
	uint64_t (*now)(void);
	int (*until)(uint64_t);
	int (*join)(void);
	int (*leave)(void);
	int (*busy)(unsigned int, unsigned int, uint64_t *);
};

// Takes path over. The name of what is missing, NULL if nothing is.
static const char *door_open(struct door *d, char *path) {
	d->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	free(path);
	if (d->library == NULL) return dlerror();
#define FIND(member, name) if ((*(void **)&d->member = dlsym(d->library, name)) == NULL) return "it has no " name ": it isn't a software GPU's"
	FIND(init, "cuInit");
	FIND(now, "softgpu_clock_ns");
	FIND(until, "softgpu_sleep_until_ns");
	FIND(join, "softgpu_clock_join");
	FIND(leave, "softgpu_clock_leave");
	FIND(busy, "softgpu_busy_ns");
	return NULL;
}

static int door_init(struct door d) { return d.init(0); }
static uint64_t door_now(struct door d) { return d.now(); }
static int door_until(struct door d, uint64_t until) { return d.until(until); }
static int door_join(struct door d) { return d.join(); }
static int door_leave(struct door d) { return d.leave(); }
static int door_busy(struct door d, unsigned int card, unsigned int pid, uint64_t *out) { return d.busy(card, pid, out); }
*/
import "C"

import "fmt"

// Clock is the clock of one driver root. A process can open one.
type Clock struct{ door C.struct_door }

// Open loads the libcuda of a software GPU's root, by its path, and joins the clock.
func Open(libcuda string) (*Clock, error) {
	c := &Clock{}
	if fault := C.door_open(&c.door, C.CString(libcuda)); fault != nil {
		return nil, fmt.Errorf("load %s: %s", libcuda, C.GoString(fault))
	}
	if err := result("start the driver", C.door_init(c.door)); err != nil {
		return nil, err
	}
	return c, nil
}

// Now is the clock's time in nanoseconds.
func (c *Clock) Now() int64 { return int64(C.door_now(c.door)) }

// SleepUntil waits until a time.
func (c *Clock) SleepUntil(until int64) error {
	return result("sleep", C.door_until(c.door, C.uint64_t(max(until, 0))))
}

// Join makes one thread more a member of a virtual clock, Leave one thread less: who
// waits for anything but time must not be one.
func (c *Clock) Join() error { return result("join the clock", C.door_join(c.door)) }

// Leave is Join undone.
func (c *Clock) Leave() error { return result("leave the clock", C.door_leave(c.door)) }

// Busy is how long a card, by its index, has worked for a process up to now. pid is
// as the process sees itself.
func (c *Clock) Busy(card, pid int) (int64, error) {
	var ns C.uint64_t
	err := result("read busy time", C.door_busy(c.door, C.uint(card), C.uint(pid), &ns))
	return int64(ns), err
}

func result(what string, r C.int) error {
	if r != 0 {
		return fmt.Errorf("%s: CUDA error %d", what, r)
	}
	return nil
}
