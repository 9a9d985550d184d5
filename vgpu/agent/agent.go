package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	events "k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/compute/loop"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/mps"
)

// Hardware is what the agent needs of the driver; nvml.Driver has it.
type Hardware interface {
	Inventory() (gpu.Inventory, error)
	Sample(uuid string) (gpu.Sample, error)
	// Occupancy is Sample without the card's load.
	Occupancy(uuid string) (gpu.Sample, error)
	// Utilization is how much of a card's time each process had in the period after
	// since, an earlier answer's At.
	Utilization(uuid string, since uint64) (gpu.Utilization, error)
	// ComputeModes are for cards that a keeper of MPS left behind.
	mps.ComputeModes
}

// Config is what an Agent is made of.
type Config struct {
	// Node is the name of this node.
	Node string
	// RunDir holds the slices' files and must be seen by the container runtime
	// under the same path; it may be lost at a reboot. StateDir is durable.
	RunDir, StateDir string
	// LibDir holds the front libraries and carve-hook as they were installed
	// with the agent.
	LibDir string
	// Root is the driver's; Software says that it is the software GPU's.
	Root     gpu.Root
	Software bool
	// OpenHardware loads the driver. It is tried again until it works.
	OpenHardware func() (Hardware, error)
	// Pods reads pods and writes events, Reports writes the node's report.
	Pods    kubernetes.Interface
	Reports *gpunodes.Client
	// SlotsPerCard is how many containers may share a card, where the node's
	// GPUNode doesn't say.
	SlotsPerCard int
	// StopUnadjusted stops containers that should have a card and were started
	// without the hook, and those that lost their context with a card's MPS server and
	// keep it from the next one, so that the kubelet starts them again; without it they
	// are only reported.
	StopUnadjusted bool
	// Layers hold memory limits beside the library, strongest first.
	Layers []Layer
	// Compute is how the cards' compute is divided; empty for ComputeShares.
	Compute ComputeMode
	// Place chooses cards for pods that came past the extender; without it they
	// get none. It must not call the agent.
	Place   func(LocalPod) (api.Grant, error)
	Version string
	Log     *slog.Logger
	// SlotsChanged is told how many slots the node has.
	SlotsChanged func(int)

	// CardsChanged asks for a call of SetSharing for the cards that there are now; nil
	// where no configuration of NVIDIA's is followed. NodeLabels is told the node's
	// labels of NVIDIA's plugin, whenever they may have changed. Both may be called
	// from any goroutine, and must not call the agent.
	CardsChanged func()
	NodeLabels   func(map[string]string)

	// Waiting is called once if another agent of the node has to end first.
	Waiting func()

	// step, in tests, is called before and after each durable step.
	step func(name string)
	// grace, in tests, is another lostGrace.
	grace time.Duration
	// fewerAfter, in tests, is another fewerAfter.
	fewerAfter time.Duration
	// groupsOf gives the cgroups of a process; tests have processes without. nil: cgroupsOf.
	groupsOf func(pid int) (string, error)
}

// Agent is the life of the slices of one node. All its methods may be called
// concurrently; those that the hook and the device plugin call answer from
// memory.
type Agent struct {
	Config
	journal journal
	files   files
	// installed are the libraries as they were built, and carve-hook as
	// containers get it.
	installed Installed
	lock      *os.File
	queue     workqueue.TypedRateLimitingInterface[string]
	events    events.EventRecorder
	started   time.Time

	// dirty asks for a new report, resized for a look at the node's capacity.
	dirty, resized chan struct{}
	// reported tells readers of the local API of each change.
	reported changes
	// accessDoubted asks for a look at the containers' device rules.
	accessDoubted chan struct{}
	// stirred asks for a look at the processes of shares; looks counts them.
	stirred chan struct{}
	looks   atomic.Uint64
	// mpsStirred asks for a look at the cards' MPS daemons.
	mpsStirred chan struct{}
	// compute divides the cards' time; nil while nobody does.
	compute atomic.Pointer[loop.Loop]
	// contexts is what a context costs.
	contexts *contextCosts

	privileged namespaces

	// holdMu is held while a container's limits are put in force, mpsMu while the cards'
	// MPS daemons are looked at; no driver is asked under that.
	holdMu, mpsMu sync.Mutex
	// tellMu is held while the device plugin is told of slots; told belongs to it.
	tellMu sync.Mutex
	told   toldSlots
	// owedMu is held while what is owed is written.
	owedMu sync.Mutex
	// cardWorkers are the goroutines of cardWork.
	cardWorkers sync.WaitGroup

	mu sync.Mutex
	// changed is closed and replaced whenever someone in AwaitPrepared may have
	// got what it waits for.
	changed chan struct{}
	// pods are this node's, as the watch shows them; watched says that it has
	// shown all of them once.
	pods    map[string]pod
	watched bool
	// held are the slices in place or being made, by pod UID.
	held map[string]*holding
	// refused says why a pod's grant isn't honoured.
	refused map[string]string
	// sandboxes are what the runtime says of pods.
	sandboxes map[string]sandbox
	// containers are those that haven't exited, by ID; listed says that the
	// runtime has listed them since this process started.
	containers map[string]use
	listed     bool
	// linkedSince is zero while the hook's link is down, and then downSince
	// says since when.
	linkedSince, downSince time.Time
	// linkFault says why it can't be made; downSaid that this was said on the
	// node.
	linkFault, downSaid string
	hardware            hardwareState
	mps                 mpsState
	// cardWork is what is under way on cards that are, or were, in mode mps; releaseNext
	// when one that a keeper left, and that couldn't be given back, is tried again.
	cardWork    map[string]cardWork
	releaseNext map[string]time.Time
	// epochsKept are those of mps.epochs that the next process of the agent will know.
	epochsKept map[string]uint64
	// owed are those who wait for word that a card's MPS daemon serves again, by card.
	owed map[string][]owed
	// foreignModes are the compute modes of cards that somebody else has set, as was said.
	foreignModes map[string]gpu.ComputeMode
	// layers are Config.Layers with what is known of them.
	layers []layerState
	twins  twins
	// accessRepairs counts the containers that got lost devices back.
	accessRepairs uint64
	// sights are what was seen of containers' files, by ID; limitsRestored counts
	// the limits files that were put right.
	sights         map[string]*sight
	limitsRestored uint64
	// linked says that the hook was linked once since this process started,
	// stands that the API shows this process's report.
	linked, stands bool
	// wishedSlots is the operator's number of slots for each card, 0 for none.
	wishedSlots int32
	// faults say why a pod's slices aren't as they should be, storeFault why no
	// pod's could be.
	faults     map[string]string
	storeFault string
	// cordoned are the cards that the operator takes no new slices on.
	cordoned []string
	// sharing is what NVIDIA's configuration says of cards, by UUID; sharedFor are the
	// cards that it was asked about, nil until it was.
	sharing   map[string]v1alpha1.Sharing
	sharedFor []string
	// hadReplicas says of cards that have fewer replicas now how many they had.
	hadReplicas map[string]moreReplicas

	// written is the report as last written. It belongs to writeReports.
	written *v1alpha1.GPUNode
	// unshown are pods that hold nothing any more and that no report has shown.
	unshown []string
}

// holding is a pod's slices in memory.
type holding struct {
	record
	// prepared says that the files are in place; preparedAt is since when, zero
	// for what an earlier process prepared.
	prepared   bool
	preparedAt time.Time
	// shown says that a report of this process has told of it.
	shown bool
	// next is a later grant that is being put in force; meanwhile the record's
	// is, and room is kept for both.
	next *record
	// granted is next once it is in the journal: from then on it counts.
	granted *record
	// refusedGeneration is that of a later grant that can't be put in force, 0
	// if there is none, and refusal says why.
	refusedGeneration int
	refusal           string
	// renew says that something of the limits files is out of date that isn't in
	// the record.
	renew bool
	// amiss says that something is wrong with the files; found what was at the
	// start. generations and kept are the limits files' generations, and the files
	// themselves, as last seen. restoredSaid is when the pod was told.
	amiss        bool
	found        map[string]wrong
	generations  map[string]uint64
	kept         map[string][2]fileID
	restoredSaid map[string]time.Time
	// used are the containers that may have run with their slice.
	used map[string]bool
	// tallies are what was counted of each container, by card.
	tallies map[string][]tally
}

// use is a container that hasn't exited.
type use struct {
	uid, container string
	hostPID        int
	// started says that it had a process for sure.
	started bool
	// adjusted is false for a container that should have a card and was started
	// without the hook; stopped says that we did something about it; lostTold that its
	// pod heard that it keeps its card from an MPS server and isn't stopped.
	adjusted, stopped, lostTold bool
	// asked says that the device plugin marked it.
	asked bool
	// devices are those in its specification; accessLost says that some of them
	// can't be opened, and that this was said.
	devices    []gpu.DeviceNode
	accessLost bool
	// epoch is that of its card's MPS daemon in which it is served, 0 without one.
	epoch uint64
	// layers say what each layer does for it.
	layers map[string]held
}

// New opens the journal and prepares what it holds, so that the hook can serve
// from the first moment. A second agent on the node waits here for the first
// one to end, until ctx ends.
func New(ctx context.Context, c Config) (*Agent, error) {
	if c.groupsOf == nil {
		c.groupsOf = cgroupsOf
	}
	a := &Agent{
		Config: c,
		files:  files{filepath.Join(c.RunDir, "slices"), c.Compute != ComputeOff},
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](50*time.Millisecond, 10*time.Second)),
		events:        &events.FakeRecorder{},
		started:       time.Now(),
		downSince:     time.Now(),
		dirty:         make(chan struct{}, 1),
		resized:       make(chan struct{}, 1),
		accessDoubted: make(chan struct{}, 1),
		stirred:       make(chan struct{}, 1),
		mpsStirred:    make(chan struct{}, 1),
		changed:       make(chan struct{}),
		pods:          map[string]pod{},
		held:          map[string]*holding{},
		refused:       map[string]string{},
		faults:        map[string]string{},
		sandboxes:     map[string]sandbox{},
		containers:    map[string]use{},
		sights:        map[string]*sight{},
		hadReplicas:   map[string]moreReplicas{},
		cardWork:      map[string]cardWork{},
		releaseNext:   map[string]time.Time{},
		owed:          map[string][]owed{},
	}
	err := errors.Join(os.MkdirAll(a.files.dir, 0o755), os.MkdirAll(c.StateDir, 0o755))
	if err == nil {
		a.lock, err = lockDir(ctx, c)
	}
	if err != nil {
		a.queue.ShutDown()
		return nil, fmt.Errorf("start agent: %w", err)
	}
	if a.installed, err = install(c.LibDir, filepath.Join(c.StateDir, "lib")); err == nil {
		a.journal, err = openJournal(filepath.Join(c.StateDir, "journal"))
	}
	if err == nil {
		// The device plugin registers with what the node had, whether its driver
		// is loaded yet or not.
		a.recallCards()
		var fault error
		if a.contexts, fault = recallContexts(contextsFile(c.StateDir)); fault != nil {
			c.Log.Warn("what contexts cost is forgotten, and learnt again", "error", fault)
		}
		a.recallMPS()
		err = a.replay()
	}
	if err != nil {
		a.queue.ShutDown()
		a.lock.Close()
		return nil, fmt.Errorf("start agent: %w", err)
	}
	return a, nil
}

// lockEvery is how soon a waiting agent sees that the other one has ended. In
// between, containers wait.
const lockEvery = 10 * time.Millisecond

// lockDir makes sure that one agent at a time owns the journal: while a
// DaemonSet rolls, or a force-deleted pod lingers, there can be two.
func lockDir(ctx context.Context, c Config) (*os.File, error) {
	dir := c.StateDir
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for first := true; ; first = false {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		if first {
			c.Log.Info("another agent of this node still runs; waiting for it to end", "dir", dir)
			if next, err := os.OpenFile(filepath.Join(dir, nextFile), os.O_RDWR|os.O_CREATE, 0o600); err == nil {
				// Held as long as this one waits; a third one does without.
				defer next.Close()
				unix.Flock(int(next.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			}
			if c.Waiting != nil {
				c.Waiting()
			}
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("lock %s, which another agent holds: %w", dir, ctx.Err())
		case <-time.After(lockEvery):
		}
	}
}

// nextFile is locked by the agent that waits for this one to end.
const nextFile = "next"

// Followed reports whether another agent of this node waits for this one to end.
func (a *Agent) Followed() bool {
	f, err := os.OpenFile(filepath.Join(a.StateDir, nextFile), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// replay takes the journal over. What it holds is prepared again, which
// changes nothing for slices that are as they should be; what was being
// cleared is taken up by reconcile.
func (a *Agent) replay() error {
	records, faults, err := a.journal.read()
	if err != nil {
		return err
	}
	for _, f := range faults {
		a.Log.Error("a journal record can't be read and was set aside", "error", f)
	}
	for _, r := range records {
		h := &holding{record: r, used: map[string]bool{}}
		for name := range r.Grant.Containers {
			// It may have run and ended before this process knew of it, and
			// what its processes were charged is still to be taken off.
			h.used[name] = true
		}
		a.held[r.Grant.UID] = h
		if r.State == stateHeld {
			h.found, h.amiss = a.foundAtStart(r), true
			if err := a.prepareFiles(r); err != nil {
				a.Log.Error("a slice can't be prepared", "pod", r.Namespace+"/"+r.Pod, "error", err)
			} else {
				h.prepared = true
			}
		}
		a.queue.Add(r.Grant.UID)
	}
	a.Log.Info("journal read", "pods", len(records))
	return nil
}

// Run watches pods, reconciles and reports until ctx ends. It returns when all
// of that has stopped.
func (a *Agent) Run(ctx context.Context) error {
	defer a.lock.Close()
	broadcaster := events.NewBroadcaster(events.WithContext(ctx))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(eventSink(a.Pods))
	a.mu.Lock()
	a.events = broadcaster.NewRecorder(eventScheme, corev1.EventSource{Component: "carve-node", Host: a.Node})
	a.mu.Unlock()

	var parts sync.WaitGroup
	for _, part := range []struct {
		name string
		run  func(context.Context)
	}{
		{"cards", a.watchCards},
		{"pods", a.watchPods},
		{"namespaces", a.watchNamespaces},
		{"report", a.writeReports},
		{"reclaim", a.reclaimLoop},
		{"compute", a.divideCompute},
		{"MPS", a.watchMPS},
		{"capacity", a.advertise},
		{"device access", a.watchAccess},
		{"link", a.tellLink},
		{"store", a.watchStore},
		{"slices", a.work}, {"slices", a.work}, {"slices", a.work}, {"slices", a.work},
	} {
		parts.Go(func() { a.keep(ctx, part.name, part.run) })
	}
	<-ctx.Done()
	a.queue.ShutDown()
	parts.Wait()
	return nil
}

// keep runs a part and starts it again should it ever panic: a fault in the
// report must not stop the hook from being served.
func (a *Agent) keep(ctx context.Context, name string, run func(context.Context)) {
	for ctx.Err() == nil {
		func() {
			defer func() {
				if p := recover(); p != nil {
					a.Log.Error("a part of the agent panicked and is started again", "part", name, "panic", p, "stack", stack())
				}
			}()
			run(ctx)
		}()
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}

// stepped marks a durable step for crash tests.
func (a *Agent) stepped(name string) {
	if a.step != nil {
		a.step(name)
	}
}

// wake tells those who wait that something changed. a.mu is held.
func (a *Agent) wake() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// report asks for a new report.
func (a *Agent) report() {
	a.reported.tell()
	select {
	case a.dirty <- struct{}{}:
	default:
	}
}
