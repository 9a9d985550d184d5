package lab

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Progress tells a person what goes on: one line for each finished step with the
// time that it took, and for a step that lasts, from time to time, how long it
// has lasted. A nil Progress is silent.
type Progress struct {
	mu    sync.Mutex
	w     io.Writer
	every time.Duration
	// redraw: a terminal, where the line of the running step is overwritten.
	redraw bool
	drawn  bool
}

// NewProgress writes to w, and overwrites lines when w is a terminal.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{w: w, every: 15 * time.Second}
	if f, ok := w.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb" {
			p.redraw, p.every = true, time.Second
		}
	}
	return p
}

// Note prints one line.
func (p *Progress) Note(format string, args ...any) {
	if p == nil {
		return
	}
	p.line(fmt.Sprintf(format, args...), false)
}

func (p *Progress) line(text string, running bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.drawn {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
	p.drawn = running && p.redraw
	if p.drawn {
		fmt.Fprint(p.w, text)
	} else {
		fmt.Fprintln(p.w, text)
	}
}

// step runs f and prints what and how long. detail, if not nil, is asked for
// more to say while f runs.
func (p *Progress) step(what string, detail func() string, f func() error) error {
	if p == nil {
		return f()
	}
	begin := time.Now()
	ended := make(chan struct{})
	var ticker sync.WaitGroup
	ticker.Go(func() {
		tick := time.NewTicker(p.every)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
				text := fmt.Sprintf("  … %s, %s", what, time.Since(begin).Round(time.Second))
				if detail != nil {
					text += ", " + detail()
				}
				p.line(text, true)
			}
		}
	})
	err := f()
	close(ended)
	ticker.Wait()
	took := time.Since(begin).Seconds()
	if err != nil {
		p.line(fmt.Sprintf("  ✗ %s failed after %.1f s", what, took), false)
	} else {
		p.line(fmt.Sprintf("  ✓ %-34s %6.1f s", what, took), false)
	}
	return err
}
