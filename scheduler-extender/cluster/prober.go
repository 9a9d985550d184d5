package cluster

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// The kubelet takes a second or two to find that the agent's process is gone,
// and can't tell at all while it is down itself. A pod that is bound meanwhile
// is rejected by the kubelet for good, since its device plugin is gone too. So
// the agent is asked in person just before each bind, at the very address that
// the kubelet asks. An answer that it isn't ready, or a port on which nobody
// listens, is believed; no answer isn't: the network between the extender and
// the node may be closed, and then the pod's condition is all there is.
const (
	// probeLimit bounds one question. Within a cluster an answer takes a
	// millisecond.
	probeLimit = 300 * time.Millisecond
	// askAgainEvery is how often an agent that was found down is asked.
	askAgainEvery = 200 * time.Millisecond
	// maxAnswer bounds what is read of an answer.
	maxAnswer = 4 << 10
)

// silentAgent is what is said of an agent that was found down.
const silentAgent = "its process does not answer"

// probeAddress finds where the kubelet asks the pod whether it is ready: host
// and port, or nothing where that isn't a port of the node.
func probeAddress(p *corev1.Pod) string {
	ip := p.Status.HostIP
	if !p.Spec.HostNetwork || ip == "" {
		return ""
	}
	for _, c := range p.Spec.Containers {
		if c.ReadinessProbe == nil || c.ReadinessProbe.HTTPGet == nil {
			continue
		}
		get := c.ReadinessProbe.HTTPGet
		port := int(get.Port.IntVal)
		for _, named := range c.Ports {
			if port == 0 && named.Name == get.Port.StrVal {
				port = int(named.ContainerPort)
			}
		}
		if port > 0 {
			return "http://" + net.JoinHostPort(ip, strconv.Itoa(port)) + get.Path
		}
	}
	return ""
}

// newProbeClient makes the client of the questions. Connections are kept for a
// burst; one that broke is made anew by the transport, and then it shows
// whether anybody listens.
func newProbeClient() *http.Client {
	return &http.Client{
		Timeout: probeLimit,
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: probeLimit, KeepAlive: -1}).DialContext,
			MaxIdleConnsPerHost: 1,
			MaxIdleConns:        256,
			IdleConnTimeout:     10 * time.Second,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// down asks an agent, and reports whether it is down for certain.
func (s *Source) down(ctx context.Context, address string) bool {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return false
	}
	answer, err := s.probes.Do(r)
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF)
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, maxAnswer))
	answer.Body.Close()
	return answer.StatusCode == http.StatusServiceUnavailable
}

// Look asks the agent of a node in person, if the API shows it ready, and
// tells the ledger when it is down. It is asked again until it is up, or until
// the API shows it down as well.
func (s *Source) Look(ctx context.Context, node string) {
	s.agentMu.Lock()
	address, known := s.addresses[node]
	suspect := s.suspects[node]
	s.agentMu.Unlock()
	if !known || address == "" || suspect || !s.down(ctx, address) {
		return
	}
	s.agentMu.Lock()
	again := s.addresses[node] == address && !s.suspects[node]
	if again {
		s.suspects[node] = true
	}
	s.agentMu.Unlock()
	if !again {
		return
	}
	s.Log.Warn("an agent that counts as ready doesn't answer", "node", node, "address", address)
	s.agentOf(node)
	select {
	case s.suspected <- struct{}{}:
	default:
	}
}

// askSuspects asks the agents that were found down, until each is up.
func (s *Source) askSuspects(ctx context.Context) {
	defer s.probes.CloseIdleConnections()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.suspected:
		}
		for s.askOnce(ctx) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(askAgainEvery):
			}
		}
	}
}

// askOnce asks each suspect once and reports whether any is left.
func (s *Source) askOnce(ctx context.Context) bool {
	s.agentMu.Lock()
	ask := make(map[string]string, len(s.suspects))
	for node := range s.suspects {
		ask[node] = s.addresses[node]
	}
	s.agentMu.Unlock()
	left := false
	for node, address := range ask {
		if address != "" && s.down(ctx, address) {
			left = true
			continue
		}
		s.agentMu.Lock()
		delete(s.suspects, node)
		s.agentMu.Unlock()
		s.Log.Info("an agent answers again", "node", node)
		s.agentOf(node)
	}
	return left
}
