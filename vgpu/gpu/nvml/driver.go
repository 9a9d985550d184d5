package nvml

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// callLimit bounds the calls for one card. A healthy card answers in
// milliseconds; one that fell off the bus can keep a caller in the kernel for
// ever.
const callLimit = 5 * time.Second

// Driver is a loaded and initialised NVML. Its methods may be called
// concurrently.
type Driver struct {
	lib     nvml.Interface
	log     *slog.Logger
	version string

	mu sync.Mutex
	// stuck holds what was waited for in vain and hasn't returned yet: a card's
	// index or UUID.
	stuck map[string]bool
	// known is what was last read of each card, by UUID.
	known map[string]gpu.Card
	// links are those between the cards named by linked.
	links  map[string][]gpu.Link
	linked string
}

// Open loads and initialises the NVML of a driver root. It fails where there is
// no driver, or none that works; it may be tried again.
//
// What was loaded stays for the life of the process: go-nvml's calls are bound
// to the library's functions with the first of each, so that another library,
// or the same one loaded again, would be called at the old one's addresses.
func Open(root gpu.Root, log *slog.Logger) (*Driver, error) {
	path, err := root.NVMLPath()
	if err != nil {
		return nil, fmt.Errorf("load NVML: %w", err)
	}
	d := &Driver{
		lib:   nvml.New(nvml.WithLibraryPath(path)),
		log:   log,
		stuck: map[string]bool{},
		known: map[string]gpu.Card{},
	}
	version, err := bounded(d, "driver", func() (string, error) {
		if r := d.lib.Init(); r != nvml.SUCCESS {
			return "", fault("initialise NVML", r)
		}
		v, r := d.lib.SystemGetDriverVersion()
		if r != nvml.SUCCESS {
			return "", fault("read the driver's version", r)
		}
		return v, nil
	})
	if err != nil {
		return nil, fmt.Errorf("load NVML %s: %w", path, err)
	}
	d.version = version
	return d, nil
}

// returned is NVML's answer as an error.
type returned nvml.Return

func (r returned) Error() string { return nvml.ErrorString(nvml.Return(r)) }

func fault(operation string, r nvml.Return) error {
	return fmt.Errorf("%s: %w", operation, returned(r))
}

// lost reports whether an error means that a card is gone until a reset.
func lost(err error) bool {
	var r returned
	return errors.As(err, &r) && nvml.Return(r) == nvml.ERROR_GPU_IS_LOST
}

// has reports whether the driver exports a function. go-nvml binds lazily, and
// calling a function that isn't there ends the process, so everything that is
// not in every driver since R470 is looked up before.
func (d *Driver) has(function string) bool {
	return d.lib.Extensions().LookupSymbol(function) == nil
}

// bounded runs a call and gives up waiting after callLimit. While a call for a
// key hangs, further ones for that key fail at once and cost no thread.
func bounded[T any](d *Driver, key string, call func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	var none T
	d.mu.Lock()
	if d.stuck[key] {
		d.mu.Unlock()
		return none, errors.New("an earlier call to the driver hasn't returned")
	}
	d.mu.Unlock()
	done := make(chan answer, 1)
	go func() {
		v, err := call()
		done <- answer{v, err}
	}()
	timer := time.NewTimer(callLimit)
	defer timer.Stop()
	select {
	case a := <-done:
		return a.value, a.err
	case <-timer.C:
		d.mu.Lock()
		d.stuck[key] = true
		d.mu.Unlock()
		go func() {
			<-done
			d.mu.Lock()
			delete(d.stuck, key)
			d.mu.Unlock()
		}()
		return none, fmt.Errorf("the driver didn't answer within %v", callLimit)
	}
}
