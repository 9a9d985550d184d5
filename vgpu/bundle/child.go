package bundle

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// line is one JSON line of a program.
type line map[string]any

func (l line) text(name string) string { s, _ := l[name].(string); return s }
func (l line) bool(name string) bool   { b, _ := l[name].(bool); return b }
func (l line) has(name string) bool    { _, ok := l[name]; return ok }

// number is 0 where there is none. Bytes of a card fit into a float64 exactly.
func (l line) number(name string) float64 {
	n, _ := l[name].(float64)
	return n
}

func (l line) int(name string) int64 { return int64(l.number(name)) }

// fault is the driver's error in a line, "" if there is none.
func (l line) fault() string {
	if l.bool("ok") {
		return ""
	}
	for _, name := range []string{"errorName", "reason"} {
		if s := l.text(name); s != "" {
			return s
		}
	}
	return fmt.Sprintf("error %v", l["error"])
}

// child is a program that was started. It ends at its time limit, with the run, and
// with this process.
type child struct {
	name   string
	cmd    *exec.Cmd
	in     io.WriteCloser
	lines  chan line
	cancel context.CancelFunc
	ctx    context.Context
	stop   func() bool
	pid    int

	mu     sync.Mutex
	stderr strings.Builder
	once   sync.Once
	err    error
	gone   bool // its group may be another's by now; under mu
}

// launch starts a command with a time limit, in a process group of its own.
func (r *runner) launch(name string, cmd *exec.Cmd, limit time.Duration) (*child, error) {
	ctx, cancel := context.WithTimeout(r.ctx, limit)
	c := &child{name: name, cmd: cmd, lines: make(chan line, 4096), cancel: cancel, ctx: ctx}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.Stderr = tail{c}
	cmd.WaitDelay = 2 * time.Second // a grandchild may have the pipe
	in, err := cmd.StdinPipe()
	if err == nil {
		c.in = in
		var out io.ReadCloser
		if out, err = cmd.StdoutPipe(); err == nil {
			if err = cmd.Start(); err == nil {
				go c.read(out)
			}
		}
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	c.pid = cmd.Process.Pid
	r.mu.Lock()
	r.children[c] = true
	r.mu.Unlock()
	c.stop = context.AfterFunc(ctx, c.killGroup)
	return c, nil
}

func (c *child) killGroup() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.gone {
		syscall.Kill(-c.pid, syscall.SIGKILL)
	}
}

func (c *child) read(out io.Reader) {
	defer close(c.lines)
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var l line
		if json.Unmarshal(lines.Bytes(), &l) != nil {
			l = line{"step": "text", "text": lines.Text()}
		}
		select {
		case c.lines <- l:
		case <-c.ctx.Done():
			return
		}
	}
}

// tail keeps the beginning of what a child complains of.
type tail struct{ c *child }

func (t tail) Write(b []byte) (int, error) {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	if t.c.stderr.Len() < 4096 {
		t.c.stderr.Write(b)
	}
	return len(b), nil
}

// next waits for a line of a step, and passes over others.
func (c *child) next(step string) (line, error) {
	for {
		select {
		case l, ok := <-c.lines:
			if !ok {
				return nil, fmt.Errorf("%s ended before it said %q: %w", c.name, step, c.complaint())
			}
			if l.text("step") == step {
				return l, nil
			}
			if l.has("ok") && !l.bool("ok") {
				return nil, fmt.Errorf("%s: %s: %s", c.name, l.text("step"), l.fault())
			}
		case <-c.ctx.Done():
			return nil, fmt.Errorf("%s didn't say %q in time", c.name, step)
		}
	}
}

// rest waits for the end and gives all further lines. The exit status is not looked
// at: what was refused is in the lines.
func (c *child) rest() ([]line, error) {
	c.in.Close()
	var out []line
	for {
		select {
		case l, ok := <-c.lines:
			if ok {
				out = append(out, l)
				continue
			}
			c.end()
			var exit *exec.ExitError
			if errors.As(c.err, &exit) && !exit.Exited() {
				return out, fmt.Errorf("%s: %w", c.name, c.complaint())
			}
			return out, nil
		case <-c.ctx.Done():
			c.end()
			return out, fmt.Errorf("%s took too long and was ended", c.name)
		}
	}
}

// complaint is what a child that has ended said.
func (c *child) complaint() error {
	c.end()
	c.mu.Lock()
	defer c.mu.Unlock()
	text := strings.Join(strings.Fields(c.stderr.String()), " ")
	if len(text) > 300 {
		text = text[len(text)-300:]
	}
	if c.err == nil && text == "" {
		return errors.New("exit status 0")
	}
	if text == "" {
		return c.err
	}
	return fmt.Errorf("%v: %s", c.err, text)
}

// end waits for a child that has closed its output, and kills what is left of it. It
// may be called again.
func (c *child) end() {
	c.once.Do(func() {
		timer := time.AfterFunc(time.Second, c.killGroup)
		c.err = c.cmd.Wait()
		timer.Stop()
		c.killGroup() // its children
		c.mu.Lock()
		c.gone = true
		c.mu.Unlock()
		c.stop()
		c.cancel()
	})
}

// kill ends a child at once.
func (c *child) kill() {
	c.killGroup()
	c.end()
}

// endAll ends every child that still runs.
func (r *runner) endAll() {
	r.mu.Lock()
	all := r.children
	r.children = map[*child]bool{}
	r.mu.Unlock()
	for c := range all {
		c.kill()
	}
}
