package sock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sort"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/carve-gpu/carve/api"
	nodev1 "github.com/carve-gpu/carve/api/node/v1"
	"github.com/carve-gpu/carve/monitor"
)

const (
	// maxRequest bounds what a caller may send: the largest request has three
	// names.
	maxRequest = 64 << 10
	// maxStreams bounds the calls of one connection at a time, maxWatches those
	// of all together that stay open.
	maxStreams = 64
	maxWatches = 64
	// usageEvery is how often what is in use is looked at for watches that want
	// to know.
	usageEvery = time.Second
	// gather is how long a change waits for others.
	gather = 20 * time.Millisecond
)

// Source is the agent as this package needs it.
type Source interface {
	// View reads the node now.
	View() monitor.View
	// Changed is closed at the next change of cards or slices, not of usage.
	Changed() <-chan struct{}
	// Doctor looks at the node.
	Doctor(context.Context) []api.Finding
}

// Server answers the local API.
type Server struct {
	nodev1.UnimplementedNodeServer
	Source Source
	Log    *slog.Logger

	watches chan struct{}
}

// Serve answers on a listener until ctx ends, and closes it.
func Serve(ctx context.Context, l net.Listener, source Source, log *slog.Logger) error {
	s := grpc.NewServer(
		grpc.Creds(peers{}), grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(5*time.Second),
	)
	nodev1.RegisterNodeServer(s, &Server{Source: source, Log: log, watches: make(chan struct{}, maxWatches)})
	var ended sync.WaitGroup
	ended.Add(1)
	stop := context.AfterFunc(ctx, func() {
		defer ended.Done()
		s.Stop() // watches would keep a graceful end from coming
	})
	err := s.Serve(l)
	if stop() {
		ended.Done()
	}
	ended.Wait()
	if err == nil || errors.Is(err, grpc.ErrServerStopped) {
		return nil
	}
	return fmt.Errorf("serve the local API: %w", err)
}

// ListCards is the call of that name.
func (s *Server) ListCards(context.Context, *nodev1.ListCardsRequest) (*nodev1.ListCardsResponse, error) {
	v := s.Source.View()
	return &nodev1.ListCardsResponse{
		Node: v.Node, AgentVersion: v.Version, DriverVersion: v.DriverVersion,
		HookLinked: !v.LinkedSince.IsZero(), Cards: cards(v),
		Enforcement: v.Enforcement, EnforcementReason: v.EnforcementReason,
	}, nil
}

// ListSlices is the call of that name.
func (s *Server) ListSlices(_ context.Context, r *nodev1.ListSlicesRequest) (*nodev1.ListSlicesResponse, error) {
	v := s.Source.View()
	out := &nodev1.ListSlicesResponse{Node: v.Node}
	for _, sl := range slices(v) {
		if r.GetCard() == "" || r.GetCard() == sl.GetCard() {
			out.Slices = append(out.Slices, sl)
		}
	}
	return out, nil
}

// Doctor is the call of that name.
func (s *Server) Doctor(ctx context.Context, _ *nodev1.DoctorRequest) (*nodev1.DoctorResponse, error) {
	out := &nodev1.DoctorResponse{}
	for _, f := range s.Source.Doctor(ctx) {
		out.Findings = append(out.Findings, &nodev1.Finding{
			Check: f.Check, Level: string(f.Level), Where: f.Where, What: f.What, Why: f.Why, Remedy: f.Do,
		})
	}
	return out, nil
}

// Resize is the call of that name. The amounts of a pod are in the extender's
// ledger; changed here, the ledger would hand the difference out again.
func (s *Server) Resize(ctx context.Context, r *nodev1.ResizeRequest) (*nodev1.ResizeResponse, error) {
	who := callerOf(ctx)
	log := s.Log.With("call", "Resize", "pid", who.PID, "uid", who.UID, "gid", who.GID, "pod", r.GetPodUid(), "container", r.GetContainer())
	for _, sl := range s.Source.View().Slices {
		if sl.PodUID == r.GetPodUid() && sl.Container == r.GetContainer() {
			log.Warn("refused a change through the node's socket")
			return nil, status.Errorf(codes.FailedPrecondition,
				"pod %s/%s is Kubernetes': its share is booked in the extender's ledger, and changes there: carve resize -n %s pod/%s --container %s --gpumem MIB --gpucores PERCENT",
				sl.Namespace, sl.Pod, sl.Namespace, sl.Pod, sl.Container)
		}
	}
	log.Warn("refused a change of a slice that isn't here")
	return nil, status.Errorf(codes.NotFound, "there is no slice of pod UID %q, container %q on this node; carve slices --local lists them", r.GetPodUid(), r.GetContainer())
}

// Watch is the call of that name.
func (s *Server) Watch(r *nodev1.WatchRequest, stream grpc.ServerStreamingServer[nodev1.WatchResponse]) error {
	select {
	case s.watches <- struct{}{}:
		defer func() { <-s.watches }()
	default:
		return status.Errorf(codes.ResourceExhausted, "%d watches are open, allowed are %d", maxWatches, maxWatches)
	}
	var tick <-chan time.Time
	if r.GetUsage() {
		t := time.NewTicker(usageEvery)
		defer t.Stop()
		tick = t.C
	}
	var sent state
	for first := true; ; first = false {
		changed := s.Source.Changed() // before the look, so that nothing is missed
		now := stateOf(s.Source.View(), r.GetUsage())
		events := diff(sent, now)
		if first {
			events = append(events, &nodev1.WatchResponse{Type: nodev1.WatchResponse_SYNCED})
		}
		for _, e := range events {
			if err := stream.Send(e); err != nil {
				return err
			}
		}
		sent = now
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
			// One look for a burst of changes.
			select {
			case <-stream.Context().Done():
				return nil
			case <-time.After(gather):
			}
		case <-tick:
		}
	}
}

// cards lists the cards of a view by index.
func cards(v monitor.View) []*nodev1.Card {
	exclusive := map[string]bool{}
	for _, s := range v.Slices {
		exclusive[s.Card] = exclusive[s.Card] || s.Mode == string(api.ModeExclusive)
	}
	out := make([]*nodev1.Card, 0, len(v.Cards))
	for _, c := range v.Cards {
		out = append(out, &nodev1.Card{
			Uuid: c.UUID, Index: int32(c.Index), Model: c.Model, PciBusId: c.PCIBusID, NumaNode: int32(c.NUMANode),
			MemoryBytes: uint64(c.MemoryMiB()) << 20, GrantedBytes: c.GrantedBytes, GrantedCores: int32(c.GrantedCores),
			Exclusive: exclusive[c.UUID], UsedBytes: c.Sample.UsedBytes, MigMode: c.MIGMode, Fault: c.Fault, Lost: c.Lost,
			SoftwareGpu: v.Software, Layers: c.Layers,
			SharingMode: c.SharingMode, Replicas: int32(c.Replicas), MpsFault: c.MPSFault,
		})
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].GetIndex() < out[j].GetIndex() })
	return out
}

// slices lists the slices of a view by card, pod and container.
func slices(v monitor.View) []*nodev1.Slice {
	out := make([]*nodev1.Slice, 0, len(v.Slices))
	for _, s := range v.Slices {
		out = append(out, &nodev1.Slice{
			PodUid: s.PodUID, Namespace: s.Namespace, Pod: s.Pod, Container: s.Container, Card: s.Card, Mode: s.Mode,
			LimitBytes: s.LimitBytes, Cores: int32(s.Cores), Active: s.Active,
			UsedBytes: s.UsedBytes, ResidualBytes: s.ResidualBytes, PeakBytes: s.PeakBytes, Refusals: s.Refusals, Processes: int32(s.Processes), Generation: int32(s.Generation), Fault: s.Fault,
		})
	}
	sort.SliceStable(out, func(i, j int) bool {
		a, b := out[i], out[j]
		if a.GetCard() != b.GetCard() {
			return a.GetCard() < b.GetCard()
		}
		return sliceKey(a) < sliceKey(b)
	})
	return out
}

func sliceKey(s *nodev1.Slice) string {
	return s.GetNamespace() + "/" + s.GetPod() + "/" + s.GetPodUid() + "/" + s.GetContainer() + "/" + s.GetCard()
}
