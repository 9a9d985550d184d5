package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

// carves are all of carve's service accounts.
const carves = "system:serviceaccounts:" + api.Namespace

// write is one request that changed something, or was meant to.
type write struct {
	Verb string
	User struct{ Username string }
	// ObjectRef is nil where the request named no object.
	ObjectRef *struct{ Resource, Subresource, Namespace, Name string }
}

func (w write) String() string {
	who := w.User.Username[strings.LastIndexByte(w.User.Username, ':')+1:]
	if w.ObjectRef == nil {
		return who + " " + w.Verb
	}
	what := w.ObjectRef.Resource
	if w.ObjectRef.Subresource != "" {
		what += "/" + w.ObjectRef.Subresource
	}
	return who + " " + w.Verb + " " + what
}

type writes []write

// of counts the writes of one resource.
func (w writes) of(resource string) int {
	n := 0
	for _, x := range w {
		if x.ObjectRef != nil && x.ObjectRef.Resource == resource {
			n++
		}
	}
	return n
}

// tell says on stderr what the writes were.
func tell(when string, w writes) {
	kinds := map[string]int{}
	for _, x := range w {
		kinds[x.String()]++
	}
	fmt.Fprintf(os.Stderr, "writes by carve, %s: %d\n", when, len(w))
	for _, k := range slices.Sorted(maps.Keys(kinds)) {
		fmt.Fprintf(os.Stderr, "  %4d %s\n", kinds[k], k)
	}
}

// logged is how long the log of carve's writes is. The API server writes it
// before it answers, so what was answered is in there.
func logged(c *install.Cluster) int64 {
	info, err := os.Stat(c.Lab.Path(lab.AuditLog))
	if err != nil {
		return 0 // nothing was written yet
	}
	return info.Size()
}

// since reads what was logged from an offset on.
func since(c *install.Cluster, offset int64) (writes, error) {
	f, err := os.Open(c.Lab.Path(lab.AuditLog))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	defer f.Close()
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	var out writes
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var w write
		if err := json.Unmarshal(lines.Bytes(), &w); err != nil {
			return nil, fmt.Errorf("read the audit log: %w", err)
		}
		out = append(out, w)
	}
	return out, lines.Err()
}

// quiet waits until carve has written nothing for five seconds.
func quiet(ctx context.Context, c *install.Cluster) error {
	last, at := logged(c), time.Now()
	return c.Wait(ctx, 2*time.Minute, "carve to write nothing", func(context.Context) (string, error) {
		if now := logged(c); now != last {
			last, at = now, time.Now()
		}
		if time.Since(at) < 5*time.Second {
			return "it wrote " + time.Since(at).Round(time.Millisecond).String() + " ago", nil
		}
		return "", nil
	})
}

// idle counts what carve writes while nothing happens. The time begins when the
// last write is five seconds old, so that what pods caused isn't counted.
func idle(ctx context.Context, c *install.Cluster) error {
	const window = 90 * time.Second
	if err := quiet(ctx, c); err != nil {
		return err
	}
	before := logged(c)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(window):
	}
	writes, err := since(c, before)
	if err != nil {
		return err
	}
	tell(fmt.Sprintf("idle for %s", window), writes)
	fmt.Printf("idle_api_writes_per_minute %.2f writes/min\n", float64(len(writes))/window.Minutes())
	return nil
}
