package agent

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/mps"
	"github.com/carve-gpu/carve/vgpu/region"
)

// keeperSide is what the agent sees of a keeper: a lock and a file for each card.
type keeperSide struct {
	*testNode
	lock *os.File
}

func withKeeper(n *testNode) *keeperSide {
	n.t.Helper()
	for _, path := range []string{gpu.MPSControl, gpu.MPSServer} {
		path = filepath.Join(n.dir, "driver", path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			n.t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			n.t.Fatal(err)
		}
	}
	k := &keeperSide{testNode: n}
	if err := os.MkdirAll(string(n.mpsDir()), 0o755); err != nil {
		n.t.Fatal(err)
	}
	k.begin()
	n.t.Cleanup(func() { k.lock.Close() })
	return k
}

func (k *keeperSide) begin() {
	k.t.Helper()
	f, err := os.OpenFile(filepath.Join(string(k.mpsDir()), "keeper.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		k.t.Fatal(err)
	}
	k.lock = f
}

func (k *keeperSide) says(card string, s mps.State) {
	k.t.Helper()
	s.Version, s.Card, s.Since = mps.Version, card, time.Now()
	b, err := json.Marshal(s)
	path := filepath.Join(k.mpsDir().Card(card), "state.json")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = os.WriteFile(path+".test", b, 0o644)
	}
	if err == nil {
		err = os.Rename(path+".test", path)
	}
	if err != nil {
		k.t.Fatal(err)
	}
}

func serving(epoch uint64) mps.State {
	p, err := mps.ProcessOf(os.Getpid()) // one that lives
	if err != nil {
		panic(err)
	}
	return mps.State{Epoch: epoch, Ready: true, Exclusive: true, Daemon: &p, Servers: []mps.Process{p}}
}

func down(epoch uint64, fault string) mps.State {
	return mps.State{Epoch: epoch, Exclusive: true, Error: fault}
}

func (k *keeperSide) wanted(card string, want bool) {
	k.t.Helper()
	eventually(k.t, "what is wanted of card "+card, func() bool {
		is, err := k.mpsDir().IsWanted(card)
		return err == nil && is == want
	})
}

func (k *keeperSide) missingOf(uid string) string {
	why, _, _ := k.missing("default", "pod-"+uid, "app")
	return why
}

func (k *keeperSide) card(uuid string) v1alpha1.Card {
	s, _ := k.api.report()
	for _, c := range s.Cards {
		if c.UUID == uuid {
			return c
		}
	}
	return v1alpha1.Card{}
}

func modeShare(card string, memMiB int64, cores int, mode api.Mode) map[string][]api.CardGrant {
	return map[string][]api.CardGrant{"app": {{Card: card, MemMiB: memMiB, Cores: cores, Mode: mode}}}
}

func TestAContainerWaitsForItsCardsDaemon(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "u", grantOf("u", 1, modeShare(cardA, 8000, 30, api.ModeMPS))))
	eventually(t, "it waits for a keeper", func() bool {
		why, final, _ := n.missing("default", "pod-u", "app")
		return strings.Contains(why, "no `carve mps` runs on this node") && !final
	})
	k := withKeeper(n)
	k.wanted(cardA, true)
	k.wanted(cardB, false)
	eventually(t, "it waits for the daemon", func() bool { return strings.Contains(k.missingOf("u"), "is being started") })
	if _, err := n.Slice(RuntimeContainer{ID: "c", PodUID: "u", Name: "app"}); err == nil || !strings.Contains(err.Error(), "is being started") {
		t.Errorf("the hook is told %v", err)
	}
	k.says(cardA, down(1, "the MPS daemon ended before it served: exit status 1"))
	eventually(t, "it is told what is wrong", func() bool { return strings.Contains(k.missingOf("u"), "exit status 1") })
	eventually(t, "so is the report", func() bool {
		m := k.card(cardA).MPS
		return m != nil && !m.Ready && strings.Contains(m.Reason, "exit status 1") && m.Since != nil
	})
	waiting := make(chan error, 1)
	go func() { waiting <- n.AwaitPrepared(t.Context(), "default", "pod-u", "app") }()
	k.says(cardA, serving(2))
	if err := <-waiting; err != nil {
		t.Errorf("PreStart was told %v", err)
	}
	p, err := n.Slice(RuntimeContainer{ID: "c", PodUID: "u", Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	dir := n.mpsDir()
	if p.MPS == nil || *p.MPS != (PreparedMPS{dir.Pipe(cardA), dir.Shm(cardA), 30, 8000}) || p.LimitsPath == "" {
		t.Errorf("%+v, %+v", p, p.MPS)
	}
	l, err := region.ReadLimits(p.LimitsPath)
	if err != nil {
		t.Fatal(err)
	}
	if c := l.Cards[0]; c.LimitBytes != 8000<<20 || c.MPSPercent != 30 || c.ComputePPM != 0 || c.ComputeFixed {
		t.Errorf("limits %+v", c)
	}
	if b, err := os.ReadFile(p.LimitsPath); err != nil || b[24] != 0 {
		t.Errorf("carve's own limits of compute are in force beside those of MPS (%v)", err)
	}
	if shares := n.computeShares(); len(shares) != 0 {
		t.Errorf("it is among those whose compute is divided: %+v", shares)
	}
	eventually(t, "the report says that it is well", func() bool { m := k.card(cardA).MPS; return m != nil && m.Ready && m.Reason == "" })
	if m := k.card(cardB).MPS; m != nil {
		t.Errorf("of the other card the report says %+v", m)
	}
	n.api.deletePod("u")
	k.wanted(cardA, false)
}

// node-21: the pods that a daemon served are told when it is down and when it is back,
// also by an agent that was away meanwhile; those that came later aren't.
func TestPodsOfADaemonThatEndsAreTold(t *testing.T) {
	n := startNode(t)
	k := withKeeper(n)
	n.link()
	for _, uid := range []string{"one", "two"} {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, modeShare(cardA, 1000, 10, api.ModeMPS))))
	}
	n.api.setPod(podWith(t, "other", grantOf("other", 1, map[string][]api.CardGrant{"app": shareOf(cardB, 1000, 0)})))
	k.wanted(cardA, true)
	k.says(cardA, serving(1))
	for _, uid := range []string{"one", "two", "other"} {
		eventually(t, uid+" is prepared", func() bool { return n.prepared(uid, "app") })
	}
	containers := []RuntimeContainer{}
	run := func(uid string) {
		c := RuntimeContainer{ID: "c-" + uid, PodUID: uid, Name: "app", Adjusted: true}
		containers = append(containers, c)
		n.Adjusted(c)
	}
	run("one")
	run("other")
	k.says(cardA, down(1, "the MPS daemon (process 77) has ended: signal: killed"))
	eventually(t, "the one that runs is told", func() bool {
		return strings.Contains(n.api.said(), "pod-one MPSDown: card 0 ("+cardA+"): the MPS daemon (process 77) has ended: signal: killed")
	})
	eventually(t, "its slice says so", func() bool {
		for _, s := range k.card(cardA).Slices {
			if s.PodUID == "one" && strings.Contains(s.Fault, "signal: killed") {
				return true
			}
		}
		return false
	})
	if n.prepared("two", "app") {
		t.Error("a container may start while the daemon is down")
	}
	gone := serving(2)
	gone.Daemon = &mps.Process{PID: gone.Daemon.PID, Start: gone.Daemon.Start + 1}
	k.says(cardA, gone) // and its keeper hasn't seen it yet
	n.lookAtMPS()
	if n.prepared("two", "app") || strings.Contains(n.api.said(), "MPSRestarted") {
		t.Error("a daemon that has ended is taken for one that serves")
	}
	k.says(cardA, serving(2))
	eventually(t, "it is told again", func() bool { return strings.Contains(n.api.said(), "pod-one MPSRestarted: ") })
	run("two")
	eventually(t, "the report is well", func() bool { m := k.card(cardA).MPS; return m != nil && m.Ready })
	if said := n.api.said(); strings.Contains(said, "pod-two MPS") || strings.Contains(said, "pod-other MPS") || strings.Count(said, "MPSDown") != 1 || strings.Count(said, "MPSRestarted") != 1 {
		t.Errorf("told:\n%s", said)
	}
	// Without an agent to see it.
	n.stop()
	k.says(cardA, serving(3))
	n.start()
	n.link(containers...)
	eventually(t, "both are told", func() bool {
		return strings.Count(n.api.said(), "pod-one MPSRestarted") == 2 && strings.Count(n.api.said(), "pod-two MPSRestarted") == 1
	})
	// With nothing new an agent says nothing.
	n.stop()
	n.start()
	n.link(containers...)
	eventually(t, "a look", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.mps.cards[cardA].state.Epoch == 3 })
	n.lookAtMPS()
	if said := n.api.said(); strings.Count(said, "MPSRestarted") != 3 {
		t.Errorf("told:\n%s", said)
	}
	k.wanted(cardA, true) // none of all that took the wish back
}

func TestACardIsFreeOfMPSBeforeOthersUseIt(t *testing.T) {
	n := startNode(t)
	k := withKeeper(n)
	n.link()
	k.says(cardA, serving(4))
	for uid, g := range map[string]map[string][]api.CardGrant{
		"share": {"app": shareOf(cardA, 1000, 0)},
	} {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, g)))
		eventually(t, uid+" waits", func() bool { return strings.Contains(k.missingOf(uid), "MPS hasn't let go of it yet") })
		if _, err := n.Slice(RuntimeContainer{ID: "c", PodUID: uid, Name: "app"}); err == nil {
			t.Errorf("%s may start on a card that takes one process", uid)
		}
	}
	k.says(cardA, mps.State{Epoch: 4})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := n.AwaitPrepared(ctx, "default", "pod-share", "app"); err != nil {
		t.Error(err)
	}
}

// An outage is as old as its first cause.
func TestSinceWhenADaemonIsDown(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(1700000000+s, 0) }
	is := func(down int64, s mps.State) mpsCard {
		c := mpsCard{wanted: true, state: s}
		if down != 0 {
			c.down = at(down)
		}
		return c
	}
	bad := mps.State{Epoch: 1, Error: "x", Since: at(5)}
	ready := mps.State{Epoch: 1, Ready: true, Since: at(1)}
	for name, c := range map[string]struct {
		was, is  mpsCard
		unserved string
		want     time.Time
	}{
		"it serves":                        {is(3, bad), is(0, ready), "", time.Time{}},
		"it is being started":              {mpsCard{}, is(0, mps.State{}), "", time.Time{}},
		"it has just ended":                {is(0, ready), is(0, bad), "", at(9)},
		"another error, the same outage":   {is(3, bad), is(0, bad), "", at(3)},
		"it was down before this process":  {mpsCard{}, is(0, bad), "", at(5)},
		"the keeper is gone":               {is(0, ready), is(0, ready), "no keeper", at(9)},
		"the keeper is gone, as we begin":  {mpsCard{}, is(0, ready), "no keeper", at(9)},
		"the keeper was never there":       {mpsCard{}, is(0, mps.State{}), "no keeper", at(9)},
		"a keeper that comes back to it":   {is(3, ready), is(0, bad), "", at(3)},
		"what it says can't be read, then": {is(0, ready), mpsCard{fault: "x"}, "", at(9)},
	} {
		if got := downSince(c.was, c.is, c.unserved, at(9)); !got.Equal(c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// A keeper that is taken off while the card has a tenant leaves it held to one process.
// When the tenant has gone, the agent gives it back, and not before.
func TestACardThatAKeeperLeftIsGivenBack(t *testing.T) {
	n := startNode(t)
	k := withKeeper(n)
	n.link()
	n.api.setPod(podWith(t, "u", grantOf("u", 1, modeShare(cardA, 8000, 30, api.ModeMPS))))
	k.wanted(cardA, true)
	k.says(cardA, serving(3))
	eventually(t, "it is prepared", func() bool { return n.prepared("u", "app") })
	n.Adjusted(RuntimeContainer{ID: "c", PodUID: "u", Name: "app", Adjusted: true})
	if err := n.cards.SetComputeMode(cardA, gpu.ComputeExclusiveProcess); err != nil {
		t.Fatal(err)
	}
	mode := func() gpu.ComputeMode { m, _ := n.cards.ComputeMode(cardA); return m }
	// While there is a keeper it is the keeper's.
	k.says(cardB, mps.State{Epoch: 1, Exclusive: true})
	if err := n.cards.SetComputeMode(cardB, gpu.ComputeProhibited); err != nil {
		t.Fatal(err)
	}
	n.lookAtMPS()
	n.lookAtMPS()
	if m, _ := n.cards.ComputeMode(cardB); m != gpu.ComputeProhibited {
		t.Error("the agent set a compute mode beside a keeper")
	}
	k.lock.Close()
	k.says(cardA, down(3, "the MPS daemon (process 77) has ended: signal: killed"))
	eventually(t, "the card without a tenant is given back", func() bool { m, _ := n.cards.ComputeMode(cardB); return m == gpu.ComputeDefault })
	eventually(t, "the report says that nobody keeps the other", func() bool {
		m := k.card(cardA).MPS
		return m != nil && !m.Ready && m.Since != nil && k.card(cardB).MPS == nil
	})
	n.lookAtMPS()
	if mode() != gpu.ComputeExclusiveProcess {
		t.Fatal("a card with a tenant in mode mps is given to everybody: what runs there would have no limits")
	}
	n.Exited("c")
	n.api.deletePod("u")
	eventually(t, "it is given back", func() bool {
		s, err := n.mpsDir().State(cardA)
		return err == nil && s.Idle() && s.Error == "" && mode() == gpu.ComputeDefault
	})
	eventually(t, "the report says nothing of MPS any more", func() bool { return k.card(cardA).MPS == nil })
	n.api.setPod(podWith(t, "share", grantOf("share", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 1000, 0)})))
	eventually(t, "others may use it", func() bool { return n.prepared("share", "app") })
}

// What can't be read of a card is no reason to leave it held to one process for ever.
func TestACardWhoseStateCantBeReadIsGivenBack(t *testing.T) {
	n := startNode(t)
	n.link()
	k := withKeeper(n)
	k.says(cardA, mps.State{Epoch: 3, Exclusive: true})
	if err := n.cards.SetComputeMode(cardA, gpu.ComputeProhibited); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.mpsDir().Card(cardA), "state.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	n.lookAtMPS()
	if m, _ := n.cards.ComputeMode(cardA); m != gpu.ComputeProhibited {
		t.Error("the agent set a compute mode beside a keeper")
	}
	k.lock.Close()
	eventually(t, "it is given back", func() bool {
		s, err := n.mpsDir().State(cardA)
		m, _ := n.cards.ComputeMode(cardA)
		return err == nil && s.Idle() && s.Error == "" && m == gpu.ComputeDefault
	})
}

// A container that comes while the keeper is being told that nobody wants the card any
// more doesn't start with a daemon that is about to be ended.
func TestNobodyStartsOnACardWhoseWishTurns(t *testing.T) {
	var armed atomic.Bool
	at, on := make(chan struct{}), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(on) })
	n := startNode(t, func(c *Config) {
		c.step = func(name string) {
			if name == "mps-wish" && armed.CompareAndSwap(true, false) {
				close(at)
				<-on
			}
		}
	})
	t.Cleanup(goOn) // before the agent is stopped
	k := withKeeper(n)
	n.link()
	n.api.setPod(podWith(t, "u", grantOf("u", 1, modeShare(cardA, 8000, 30, api.ModeMPS))))
	k.wanted(cardA, true)
	k.says(cardA, serving(1))
	eventually(t, "it is prepared", func() bool { return n.prepared("u", "app") })
	eventually(t, "the report is written", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.stands })
	armed.Store(true)
	n.api.deletePod("u")
	<-at
	n.api.setPod(podWith(t, "next", grantOf("next", 1, modeShare(cardA, 8000, 30, api.ModeMPS))))
	eventually(t, "the next one is booked", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.held["next"] != nil && n.held["next"].prepared
	})
	if n.prepared("next", "app") {
		t.Error("a container may start with a daemon of which the keeper is being told that nobody wants it")
	}
	goOn()
	eventually(t, "it starts when the daemon is wanted again", func() bool { return n.prepared("next", "app") })
	k.wanted(cardA, true)
}

func TestWhoMayUseACard(t *testing.T) {
	free := mps.State{Epoch: 4}
	for name, c := range map[string]struct {
		card        mpsCard
		mps, others bool
	}{
		"served by a daemon that isn't kept": {mpsCard{wanted: true, state: serving(5)}, false, false},
		"one that MPS never had":             {mpsCard{}, false, true},
		"one that MPS has let go of":         {mpsCard{state: free}, false, true},
		"served":                             {mpsCard{wanted: true, state: serving(4)}, true, false},
		"served and not wanted":              {mpsCard{state: serving(4)}, false, false},
		"served, about to be not wanted":     {mpsCard{wanted: true, turning: true, state: serving(4)}, false, false},
		"served, about to be wanted again":   {mpsCard{turning: true, state: serving(4)}, false, false},
		"free, and wanted":                   {mpsCard{wanted: true, state: free}, false, false},
		"free, about to be wanted":           {mpsCard{turning: true, state: free}, false, false},
		"free, about to be not wanted":       {mpsCard{wanted: true, turning: true, state: free}, false, false},
		"free as far as it can be read":      {mpsCard{fault: "x"}, false, false},
		"held to one process, nobody serves": {mpsCard{state: mps.State{Exclusive: true}}, false, false},
	} {
		a := &Agent{mps: mpsState{cards: map[string]mpsCard{cardA: c.card}}, epochsKept: map[string]uint64{cardA: 4}}
		for _, mode := range []api.Mode{api.ModeMPS, api.ModeVGPU, api.ModeTimeslice, api.ModeExclusive} {
			want := c.others
			if mode == api.ModeMPS {
				want = c.mps
			}
			if why := a.unready([]api.CardGrant{{Card: cardA, MemMiB: 1, Mode: mode}}); (why == "") != want {
				t.Errorf("%s, for mode %s: %q", name, mode, why)
			}
		}
	}
	is := mpsState{cards: map[string]mpsCard{"a": {wanted: true}, "b": {}, "c": {wanted: true}}}
	want := map[string]bool{"a": false, "b": true, "c": true, "d": true, "e": false}
	for sure, turns := range map[bool]string{true: "abd", false: "bd"} {
		got := ""
		for _, uuid := range []string{"a", "b", "c", "d", "e"} {
			if is.turn(want, sure)[uuid].turning {
				got += uuid
			}
		}
		if got != turns || is.cards["a"].turning {
			t.Errorf("sure %v: %q turn, want %q", sure, got, turns)
		}
	}
}

// A part that panics is started again; what it held mustn't stay held.
func TestWhatPanicsUnderTheLockLetsGoOfIt(t *testing.T) {
	a := &Agent{}
	a.mu.Lock()
	if err := a.guarded(func() error { return os.ErrInvalid }); err != os.ErrInvalid || a.mu.TryLock() {
		t.Errorf("%v, or the lock was let go of", err)
	}
	func() {
		defer func() { _ = recover() }()
		_ = a.guarded(func() error { panic("x") })
	}()
	if !a.mu.TryLock() {
		t.Error("the lock stays held")
	}
}

func TestASliceOfTimeHasTheDriverAsItIs(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "u", grantOf("u", 1, modeShare(cardA, 40000, 50, api.ModeTimeslice))))
	eventually(t, "it is prepared", func() bool { return n.prepared("u", "app") })
	p, err := n.Slice(RuntimeContainer{ID: "c", PodUID: "u", Name: "app"})
	if err != nil || p.LimitsPath != "" || p.UsagePath != "" || p.MPS != nil || len(p.Cards) != 1 {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err := os.Stat(n.files.slice("u", "app")); !os.IsNotExist(err) {
		t.Errorf("files were made for it: %v", err)
	}
	b := exec.Command("sleep", "600")
	if err := b.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { b.Process.Kill(); b.Wait() }()
	n.Adjusted(RuntimeContainer{ID: "of-time", PodUID: "u", Name: "app", Adjusted: true})
	n.Started("of-time", b.Process.Pid)
	n.cards.mu.Lock()
	n.cards.processes = []gpu.Process{{PID: b.Process.Pid, UsedBytes: 3 << 30}, {PID: 1 << 30, UsedBytes: 5 << 30}}
	n.cards.mu.Unlock()
	eventually(t, "the driver's figures are shown for it", func() bool {
		v := n.View()
		return len(v.Slices) == 1 && v.Slices[0].Usage.UsedBytes == 3<<30 && v.Slices[0].Processes == 1
	})
	eventually(t, "it is counted", func() bool {
		s, _ := n.api.report()
		return slicesOf(s, cardA) == "u/app=active" && s.Summary.GrantedMiB == 40000
	})
}

func TestOneModeACard(t *testing.T) {
	inventory, _ := (&twoCards{}).Inventory()
	cards := map[string]gpu.Card{}
	for _, c := range inventory.Cards {
		cards[c.UUID] = c
	}
	mig := cards[cardB]
	mig.UUID, mig.MIGMode = "GPU-mig", "enabled"
	cards[mig.UUID] = mig
	hold := func(uid string, mode api.Mode) map[string]record {
		return map[string]record{uid: {State: stateHeld, Grant: grantOf(uid, 1, modeShare(cardA, 1000, 10, mode)), Order: appOrder("app")}}
	}
	more := func(mode api.Mode) map[string][]api.CardGrant {
		g := modeShare(cardA, 1000, 10, mode)
		g["b"] = modeShare(cardA, 1, 1, mode)["app"]
		return g
	}
	for name, c := range map[string]struct {
		grant api.Grant
		held  map[string]record
		want  string
	}{
		"a container more, mps":       {grantOf("u", 2, more(api.ModeMPS)), hold("u", api.ModeMPS), "has cards for container b, which has none in force"},
		"a container more, time":      {grantOf("u", 2, more(api.ModeTimeslice)), hold("u", api.ModeTimeslice), "has cards for container b, which has none in force"},
		"a container more, vgpu":      {grantOf("u", 2, more(api.ModeVGPU)), hold("u", api.ModeVGPU), "has cards for container b, which has none in force"},
		"mps on an empty card":        {grantOf("u", 1, modeShare(cardA, 1, 1, api.ModeMPS)), nil, ""},
		"mps beside mps":              {grantOf("u", 1, modeShare(cardA, 1, 1, api.ModeMPS)), hold("v", api.ModeMPS), ""},
		"time beside time":            {grantOf("u", 1, modeShare(cardA, 1, 1, api.ModeTimeslice)), hold("v", api.ModeTimeslice), ""},
		"mps beside vgpu":             {grantOf("u", 1, modeShare(cardA, 1, 1, api.ModeMPS)), hold("v", api.ModeVGPU), "shared in mode vgpu: one mode at a time"},
		"vgpu beside mps":             {grantOf("u", 1, modeShare(cardA, 1, 1, api.ModeVGPU)), hold("v", api.ModeMPS), "shared in mode mps"},
		"vgpu beside time":            {grantOf("u", 1, modeShare(cardA, 1, 1, api.ModeVGPU)), hold("v", api.ModeTimeslice), "shared in mode timeslice"},
		"mps on another card":         {grantOf("u", 1, modeShare(cardB, 1, 1, api.ModeMPS)), hold("v", api.ModeVGPU), ""},
		"too much of a card's time":   {grantOf("u", 1, modeShare(cardA, 1, 95, api.ModeTimeslice)), hold("v", api.ModeTimeslice), "10 percent"},
		"mps in MIG mode":             {grantOf("u", 1, modeShare("GPU-mig", 1, 1, api.ModeMPS)), nil, "the card is in MIG mode"},
		"a resize under MPS":          {grantOf("u", 2, modeShare(cardA, 2000, 10, api.ModeMPS)), hold("u", api.ModeMPS), "fixed at its start"},
		"a resize of a slice of time": {grantOf("u", 2, modeShare(cardA, 500, 10, api.ModeTimeslice)), hold("u", api.ModeTimeslice), "can't change while it runs"},
		"a resize of a share":         {grantOf("u", 2, modeShare(cardA, 2000, 10, api.ModeVGPU)), hold("u", api.ModeVGPU), ""},
		"two modes in one container": {grantOf("u", 1, map[string][]api.CardGrant{"app": {
			{Card: cardA, MemMiB: 1, Mode: api.ModeVGPU}, {Card: cardB, MemMiB: 1, Mode: api.ModeTimeslice}}}), nil, "of one kind only"},
		"two modes of one card in a pod": {grantOf("u", 1, map[string][]api.CardGrant{
			"a": {{Card: cardA, MemMiB: 1, Mode: api.ModeVGPU}}, "b": {{Card: cardA, MemMiB: 1, Mode: api.ModeMPS}}}), nil, "one mode at a time"},
	} {
		err := node{name: nodeName, cards: cards, held: c.held}.admit(candidate{grant: c.grant, uid: "u", order: appOrder("app", "a", "b")})
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestLimitsThatNeedNoClientAllowMore(t *testing.T) {
	limits := func(percent int) region.Limits {
		l, err := limitsOf([]api.CardGrant{{Card: cardA, MemMiB: 1000, Cores: percent, Mode: api.ModeMPS}}, func(string) cardFacts { return cardFacts{5, 108} })
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	want := limits(30)
	if want.Cards[0].Multiprocessors != 108 || limits(0).Cards[0].MPSPercent != 100 {
		t.Errorf("%+v, %+v", want.Cards[0], limits(0).Cards[0])
	}
	none := limits(30)
	none.Cards[0].MPSPercent = 0
	other := limits(30)
	other.Cards[0].Multiprocessors = 0
	for what, c := range map[string]struct {
		have         region.Limits
		within, same bool
	}{
		"the same":                       {limits(30), true, true},
		"less":                           {limits(20), true, false},
		"more":                           {limits(40), false, false},
		"no client needed":               {none, false, false},
		"a card whose size wasn't known": {other, true, true},
	} {
		if within, same := withinGranted(c.have, want), sameGranted(c.have, want); within != c.within || same != c.same {
			t.Errorf("%s: within %v, same %v", what, within, same)
		}
	}
}
