package mps

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// card is the keeper's work on one card. All of it is done by one goroutine; what is
// known is in state, which is in the file before and after each step, so that another
// keeper can go on from there.
type card struct {
	*Keeper
	uuid string
	log  *slog.Logger

	state State
	// loaded says that state was read from the file.
	loaded bool
	// ended, of a daemon that this process started, gives how it ended.
	ended chan string
	// alone says that the driver's daemon takes no option for many users, early how often
	// in a row one that was given it ended before it served.
	alone bool
	early int
	// probed is when the daemon was asked last, misses how often in a row it didn't
	// answer, faulty since when a server is in fault.
	probed time.Time
	misses int
	faulty time.Time
	// unheld is how often in a row the card couldn't be held to one process.
	unheld int
	// again is when it may be started next, wait the pause behind that; served since
	// when it serves.
	again  time.Time
	wait   time.Duration
	served time.Time
	said   string
	// shm is what is known of the card's /dev/shm, swept when it was last looked at.
	shm       leftovers
	swept     time.Time
	sweptSaid string
}

// missesAllowed is how often in a row a daemon may leave a question unanswered, and the
// driver refuse to hold the card to one process.
const missesAllowed = 2

// earlyAllowed is how often in a row a daemon may end before it serves until it is tried
// without the option for many users, though it has said nothing about that.
const earlyAllowed = 3

// run works on the card until ctx ends.
func (c *card) run(ctx context.Context) {
	var lock *os.File
	defer func() { lock.Close() }()
	for {
		var err error
		if lock == nil {
			lock, err = c.Dir.lockCard(c.uuid)
		}
		if err == nil {
			err = c.tick(ctx)
		}
		if ctx.Err() != nil {
			return
		}
		text := ""
		if err != nil {
			text = err.Error()
		}
		if text != "" && text != c.said {
			c.log.Error("the card's MPS daemon isn't as it should be; trying again", "error", text)
		}
		c.said = text
		if !pause(ctx, c.Pace.Look) {
			return
		}
	}
}

func (c *card) stepped(name string) {
	if c.step != nil {
		c.step(name)
	}
}

// write puts the state in the file.
func (c *card) write() error {
	c.state.Version, c.state.Card = Version, c.uuid
	c.stepped("state-write")
	err := put(c.Dir.state(c.uuid), c.state)
	c.stepped("state-written")
	return err
}

// become notes whether clients are served and what is wrong.
func (c *card) become(ready bool, fault string) error { return c.note(ready, false, fault) }

// closeTo notes why no more clients are let in, while those that are there go on.
func (c *card) closeTo(fault string) error { return c.note(false, true, fault) }

func (c *card) note(ready, goOn bool, fault string) error {
	if c.state.Ready != ready || c.state.GoOn != goOn || c.state.Error != fault || c.state.Since.IsZero() {
		c.state.Since = time.Now().UTC()
	}
	c.state.Ready, c.state.GoOn, c.state.Error = ready, goOn, fault
	return c.write()
}

// tick looks at how things are and takes them on by a step. It may be called at any
// time, and after a keeper that died anywhere.
func (c *card) tick(ctx context.Context) error {
	wanted, err := c.Dir.IsWanted(c.uuid)
	if err != nil {
		return err // what runs goes on
	}
	if !c.loaded {
		if err := c.adopt(); err != nil {
			return err
		}
	}
	switch {
	case !wanted:
		if c.state.Idle() && c.state.Error == "" {
			return nil
		}
		return c.quit(ctx)
	case c.state.Daemon == nil:
		if time.Now().Before(c.again) {
			return nil
		}
		return c.begin(ctx)
	case !c.state.Daemon.Lives():
		return c.fail(ctx, c.epitaph())
	}
	if time.Since(c.swept) >= c.Pace.Sweep {
		c.sweep()
	}
	if c.state.Serves() {
		if lost := c.lostServer(); lost != nil && c.state.ManyUsers {
			return c.replace(ctx, *lost)
		}
	}
	if time.Since(c.probed) < c.Pace.Probe {
		return nil
	}
	return c.probe(ctx)
}

// sweep removes what ended tenants left in the card's /dev/shm.
func (c *card) sweep() {
	c.swept = time.Now()
	n, err := c.shm.sweep(c.Dir.Shm(c.uuid), c.uuid, c.state.Epoch)
	if n > 0 {
		c.log.Info("removed what ended tenants left in /dev/shm", "files", n)
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != c.sweptSaid {
		c.log.Warn("the card's /dev/shm isn't as it should be", "error", text)
	}
	c.sweptSaid = text
}

// adopt takes over what another keeper left.
func (c *card) adopt() error {
	s, err := c.Dir.State(c.uuid)
	if err != nil {
		// Whatever the number was, it isn't this one.
		c.log.Error("what was known of the card's daemon can't be read, so it is ended", "error", err)
		s = State{Epoch: uint64(time.Now().Unix()), Exclusive: true, Servers: marked(c.uuid)}
	}
	c.state, c.loaded = s, true
	if s.Daemon != nil && s.Daemon.isOurs() {
		c.log.Info("adopted a daemon", "pid", s.Daemon.PID, "epoch", s.Epoch)
	}
	return nil
}

// lostServer is one that has ended.
func (c *card) lostServer() *Process {
	for i := range c.state.Servers {
		if !c.state.Servers[i].Lives() {
			return &c.state.Servers[i]
		}
	}
	return nil
}

// epitaph says how the daemon ended.
func (c *card) epitaph() string {
	text := fmt.Sprintf("the MPS daemon (process %d) has ended", c.state.Daemon.PID)
	if c.ended != nil {
		select {
		case how := <-c.ended:
			text += ": " + how
		case <-time.After(time.Second): // it was seen to be dead: the answer is on its way
		}
	}
	return text
}

// begin holds the card to one process and starts a daemon and its server.
func (c *card) begin(ctx context.Context) error {
	if left := c.end(ctx); left != nil {
		return c.hold(left)
	}
	if !c.state.Exclusive && c.prohibited() {
		c.again = time.Now().Add(c.Pace.AgainMost)
		return c.become(false, "the card's compute mode is PROHIBITED, which carve hasn't set: set it to DEFAULT (nvidia-smi -c DEFAULT) to have the card served")
	}
	c.state.Exclusive = true
	if err := c.write(); err != nil {
		return err
	}
	// Whoever takes the card for another mode reads the state after it no longer wants
	// the daemon, so one of the two sees the other.
	if wanted, err := c.Dir.IsWanted(c.uuid); err != nil || !wanted {
		return err // the next tick gives the card back
	}
	if err := c.begin1(ctx); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return c.fail(ctx, err.Error())
	}
	return nil
}

func (c *card) begin1(ctx context.Context) error {
	if err := c.Root.MPSPrograms(); err != nil {
		return err
	}
	if err := c.setMode(gpu.ComputeExclusiveProcess); err != nil {
		return err
	}
	if err := c.Dir.makeDirs(c.uuid); err != nil {
		return err
	}
	c.shm.starting(c.Dir.Shm(c.uuid))
	var options []string
	if !c.alone {
		options = append(options, manyUsers)
	}
	c.stepped("daemon-start")
	cmd, err := start(c.Dir, c.Root, c.uuid, options...)
	if err != nil {
		return fmt.Errorf("start the MPS daemon: %w", err)
	}
	c.stepped("daemon-started")
	c.follow(cmd)
	p, err := ProcessOf(cmd.Process.Pid)
	if err != nil {
		return c.endedEarly()
	}
	c.state.Daemon, c.state.Servers, c.state.ManyUsers = &p, nil, !c.alone
	c.state.Epoch++
	c.misses, c.faulty = 0, time.Time{}
	if err := c.become(false, c.state.Error); err != nil {
		return err
	}
	return c.open(ctx)
}

// follow notes how a daemon of this process ends.
func (c *card) follow(cmd *exec.Cmd) {
	ended := make(chan string, 1)
	c.ended = ended
	go func() {
		err := cmd.Wait()
		if err == nil {
			err = errors.New("by itself")
		}
		ended <- err.Error()
	}()
}

// endedEarly tells of a daemon that ended before it served. One that ends of its own will
// at once may not know the option.
func (c *card) endedEarly() error {
	how := ""
	select {
	case how = <-c.ended:
	case <-time.After(time.Second):
	}
	if !c.alone && strings.HasPrefix(how, "exit status") {
		if c.early++; c.early >= earlyAllowed || c.Dir.refusesOption(c.uuid) {
			c.alone, c.early, c.wait = true, 0, 0
			return fmt.Errorf("the MPS daemon ended at once (%s); trying it with one user at a time", how)
		}
	}
	c.alone = false
	return fmt.Errorf("the MPS daemon ended before it served: %s", how)
}

// open waits until a daemon answers and has a server, and lets clients in.
func (c *card) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.Pace.Begin)
	defer cancel()
	var last error
	for {
		if wanted, err := c.Dir.IsWanted(c.uuid); err == nil && !wanted {
			return nil // the next tick ends it
		}
		if !c.state.Daemon.Lives() {
			return c.endedEarly()
		}
		_, err := c.serve(ctx)
		if err == nil {
			break
		}
		if ctx.Err() == nil {
			last = err
		}
		if !pause(ctx, min(c.Pace.Look, 100*time.Millisecond)) {
			return fmt.Errorf("the MPS daemon isn't ready: %w", last)
		}
	}
	c.probed, c.served, c.early = time.Now(), time.Now(), 0
	c.shm.started(c.Dir.Shm(c.uuid), c.state.Epoch)
	if err := c.become(true, ""); err != nil {
		return err
	}
	c.log.Info("MPS daemon is ready", "pid", c.state.Daemon.PID, "epoch", c.state.Epoch, "many-users", c.state.ManyUsers)
	c.stepped("ready")
	return nil
}

// serve makes sure that there is a server that takes clients, and reports whether one
// had to be started.
func (c *card) serve(ctx context.Context) (started bool, err error) {
	answer := func(command string) error {
		ctx, cancel := context.WithTimeout(ctx, c.Pace.Answer)
		defer cancel()
		_, err := control(ctx, *c.state.Daemon, command)
		return err
	}
	list, err := c.list(ctx)
	if err == nil && len(list) == 0 {
		c.stepped("server-start")
		// Of root: with many users it serves everybody, and else it makes way for the
		// first client's.
		if err = answer("start_server -uid 0"); err == nil {
			started = true
			list, err = c.list(ctx)
		}
	}
	if err != nil {
		return started, err
	}
	if len(list) == 0 {
		return started, errors.New("it has no server")
	}
	if !slices.Equal(list, c.state.Servers) {
		c.state.Servers = list
		if err := c.write(); err != nil {
			return started, err
		}
	}
	for _, s := range list {
		ctx, cancel := context.WithTimeout(ctx, c.Pace.Answer)
		is, err := status(ctx, *c.state.Daemon, s)
		cancel()
		switch {
		case err != nil:
			return started, err
		case strings.Contains(is, "ACTIVE"):
			return started, nil
		case strings.Contains(is, "FAULT"):
			return started, fmt.Errorf("%w: its server (process %d) says %.200q", errFault, s.PID, is)
		}
		if c.state.ManyUsers {
			return started, fmt.Errorf("its server (process %d) says %.200q", s.PID, is)
		}
	}
	return started, errors.New("no server of it takes clients yet")
}

// errFault is of a server some of whose clients broke the card for all of them.
var errFault = errors.New("a client's fault broke the contexts of all")

func (c *card) list(ctx context.Context) ([]Process, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Pace.Answer)
	defer cancel()
	return servers(ctx, *c.state.Daemon, c.uuid)
}

// probe asks a daemon whether it serves, and looks whether the card is still held to it.
func (c *card) probe(ctx context.Context) error {
	c.probed = time.Now()
	before := c.state.Servers
	open := "" // why others could use the card, too
	if err := c.setMode(gpu.ComputeExclusiveProcess); err != nil {
		c.log.Error("the card can't be held to one process", "error", err)
		if c.unheld++; c.unheld >= missesAllowed || !c.state.Ready {
			open = "the card can't be held to one process: " + err.Error()
		} else {
			c.probed = time.Time{} // the next look tells whether that was a moment's
		}
	} else {
		c.unheld = 0
	}
	started, err := c.serve(ctx)
	switch {
	case ctx.Err() != nil:
		return nil
	case errors.Is(err, errFault):
		if c.faulty.IsZero() {
			c.faulty = time.Now()
		}
		if time.Since(c.faulty) > c.Pace.Fault {
			return c.fail(ctx, err.Error())
		}
		c.probed = time.Time{}
		return c.become(false, err.Error())
	case err != nil:
		if !c.state.Daemon.Lives() {
			return nil // the next tick tells how it ended
		}
		if c.misses++; c.misses < missesAllowed {
			c.probed = time.Time{}
			return err
		}
		return c.fail(ctx, "the MPS daemon doesn't serve: "+err.Error())
	}
	c.misses, c.faulty = 0, time.Time{}
	if c.served.IsZero() {
		c.served = time.Now()
	}
	replaced := started && len(before) > 0
	if replaced {
		c.log.Error("the MPS server has ended, and with it what its clients had", "pid", before[0].PID)
		c.state.Epoch++
	}
	switch {
	case open != "" && (replaced || !c.state.GoOn || c.state.Error != open):
		return c.closeTo(open)
	case open == "" && (replaced || !c.state.Ready || c.state.Error != ""):
		return c.become(true, "")
	}
	return nil
}

// replace has a server started in the place of one that ended with its clients.
func (c *card) replace(ctx context.Context, lost Process) error {
	c.log.Error("the MPS server has ended, and with it what its clients had", "pid", lost.PID)
	c.state.Epoch++
	c.state.Servers = slices.DeleteFunc(slices.Clone(c.state.Servers), func(p Process) bool { return p == lost })
	if err := c.become(false, fmt.Sprintf("the MPS server (process %d) has ended", lost.PID)); err != nil {
		return err
	}
	c.stepped("server-lost")
	c.shm.starting(c.Dir.Shm(c.uuid))
	if err := c.setMode(gpu.ComputeExclusiveProcess); err != nil {
		return c.fail(ctx, err.Error())
	}
	if err := c.open(ctx); err != nil {
		if ctx.Err() != nil {
			return err
		}
		return c.fail(ctx, err.Error())
	}
	return nil
}

// fail notes what is wrong, ends what is left, and has it started again after a pause.
// Until then nobody gets a context: the first that came would have all of the card, and
// keep the server off it.
func (c *card) fail(ctx context.Context, fault string) error {
	c.log.Error("MPS daemon down", "error", fault)
	err := errors.Join(c.become(false, fault), c.setMode(gpu.ComputeProhibited))
	left := c.end(ctx)
	if !c.served.IsZero() {
		if time.Since(c.served) > c.Pace.AgainMost {
			c.wait = 0
		}
		// It may have been for another reason that it ended early with the option.
		c.alone = false
	}
	c.served = time.Time{}
	c.again = time.Now().Add(c.wait)
	c.wait = min(max(2*c.wait, c.Pace.Again), c.Pace.AgainMost)
	if left != nil {
		return c.hold(left)
	}
	return err
}

// end ends the daemon and all servers of the card, those of which no file tells among
// them, and returns what can't be ended.
func (c *card) end(ctx context.Context) []Process {
	all := marked(c.uuid)
	if c.state.Daemon != nil {
		all = append(all, *c.state.Daemon)
	}
	all = append(all, c.state.Servers...)
	var live []Process
	for _, p := range all {
		if p.isOurs() && !slices.Contains(live, p) {
			live = append(live, p)
		}
	}
	c.stepped("end")
	for _, p := range live {
		if err := p.kill(); err != nil {
			c.log.Error("a process of MPS can't be ended", "error", err)
		}
	}
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.Pace.Quit)
	defer cancel()
	left := gone(wait, live)
	if len(left) > 0 {
		return left
	}
	c.state.Daemon, c.state.Servers = nil, nil
	if err := c.write(); err != nil {
		c.log.Error("the card's state can't be written", "error", err)
	}
	c.stepped("ended")
	return nil
}

// hold says that processes of MPS stay though they were killed: they are in the driver.
func (c *card) hold(left []Process) error {
	err := fmt.Errorf("process %d of MPS doesn't end though it was killed", left[0].PID)
	return errors.Join(err, c.become(false, err.Error()))
}

// quit ends MPS on the card, politely at first, and gives the card back to everybody.
func (c *card) quit(ctx context.Context) error {
	if c.state.Ready {
		if err := c.become(false, ""); err != nil {
			return err
		}
		// Whoever wants it again reads the state after that is written, so one of the
		// two sees the other.
		if wanted, err := c.Dir.IsWanted(c.uuid); err != nil || wanted {
			return errors.Join(err, c.become(true, ""))
		}
	}
	if c.state.Daemon != nil && c.state.Daemon.isOurs() {
		ask, cancel := context.WithTimeout(ctx, c.Pace.Quit)
		_, err := control(ask, *c.state.Daemon, fmt.Sprintf("quit -t %d", max(1, int(c.Pace.Quit.Seconds())/2)))
		if err == nil {
			gone(ask, append([]Process{*c.state.Daemon}, c.state.Servers...))
		} else {
			c.log.Warn("the MPS daemon doesn't quit; it is killed", "error", err)
		}
		cancel()
	}
	if ctx.Err() != nil {
		return nil
	}
	if left := c.end(ctx); left != nil {
		return c.hold(left)
	}
	if c.state.Exclusive { // else the mode is another's
		if err := c.setMode(gpu.ComputeDefault); err != nil {
			return errors.Join(err, c.become(false, err.Error()))
		}
	}
	c.stepped("mode-back")
	if err := c.Dir.clearDirs(c.uuid); err != nil {
		c.log.Warn("a card's folder for shared memory stays", "error", err)
	}
	c.shm = leftovers{}
	c.state.Exclusive = false
	c.again, c.wait, c.served, c.alone = time.Time{}, 0, time.Time{}, false
	c.log.Info("MPS has ended on the card", "epoch", c.state.Epoch)
	return c.become(false, "")
}

// prohibited reports whether nobody may use the card.
func (c *card) prohibited() bool {
	d, err := c.driver()
	if err != nil {
		return false // which setMode tells
	}
	is, err := d.ComputeMode(c.uuid)
	return err == nil && is == gpu.ComputeProhibited
}

// setMode sets the card's compute mode where it is another one.
func (c *card) setMode(mode gpu.ComputeMode) error {
	d, err := c.driver()
	if err != nil {
		return err
	}
	is, err := d.ComputeMode(c.uuid)
	if err != nil || is == mode {
		return err
	}
	c.stepped("mode-set")
	err = d.SetComputeMode(c.uuid, mode)
	if err == nil {
		c.log.Info("compute mode set", "from", is, "to", mode)
	}
	return err
}
