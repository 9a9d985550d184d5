package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Whoever was told that a card's MPS daemon doesn't serve, or was stopped for it, is told
// when it does. That may be long after, and another process of the agent that does it.

// owed is word that a container's pod waits for.
type owed struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	// Stopped says that the container was stopped so that the card can be served again.
	Stopped bool `json:"stopped,omitempty"`
}

func owedTo(w affected, stopped bool) owed {
	return owed{UID: w.pod.uid, Namespace: w.pod.namespace, Pod: w.pod.name, Container: w.container, Stopped: stopped}
}

func (o owed) affected() affected {
	return affected{pod{uid: o.UID, namespace: o.Namespace, name: o.Pod}, o.Container}
}

// owedFile is the content of the file in which that is kept.
type owedFile struct {
	Version int               `json:"v"`
	Cards   map[string][]owed `json:"cards"`
}

const owedVersion = 1

func (a *Agent) lastOwed() string { return filepath.Join(a.StateDir, "mps-owed.json") }

// recallOwed takes over what an earlier process owed. a.mu is held.
func (a *Agent) recallOwed() {
	b, err := os.ReadFile(a.lastOwed())
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var f owedFile
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err == nil && f.Version != owedVersion {
		err = fmt.Errorf("version %d, want %d", f.Version, owedVersion)
	}
	if err != nil {
		a.Log.Warn("which pods wait for word that MPS serves again is forgotten", "file", a.lastOwed(), "error", err)
		return
	}
	for card, list := range f.Cards {
		for _, o := range list {
			if o.UID != "" && o.Container != "" {
				a.owe(card, o)
			}
		}
	}
}

// keepOwed puts what is owed in its file.
func (a *Agent) keepOwed() {
	// Of two at once the last one writes what is owed then.
	a.owedMu.Lock()
	defer a.owedMu.Unlock()
	f := owedFile{Version: owedVersion, Cards: map[string][]owed{}}
	a.mu.Lock()
	for card, list := range a.owed {
		f.Cards[card] = slices.Clone(list)
	}
	a.mu.Unlock()
	a.remember(a.lastOwed(), f)
}

// owe notes word to a container about a card, once. a.mu is held.
func (a *Agent) owe(card string, o owed) {
	for i, was := range a.owed[card] {
		if was.UID == o.UID && was.Container == o.Container {
			a.owed[card][i].Stopped = was.Stopped || o.Stopped
			return
		}
	}
	a.owed[card] = append(a.owed[card], o)
}

// word is what an owed container hears of a card that is served again; "" where it has just
// heard as one of restarted.
func (o owed) word(card string, restarted []affected) (kind, reason, message string) {
	switch {
	case o.Stopped:
		return corev1.EventTypeWarning, reasonMPSRestarted, fmt.Sprintf(
			"card %s: its MPS daemon serves again, and container %s, which was stopped for it, can start", card, o.Container)
	case slices.ContainsFunc(restarted, func(w affected) bool { return w.pod.uid == o.UID && w.container == o.Container }):
		return "", "", ""
	}
	return corev1.EventTypeNormal, reasonMPSServes, fmt.Sprintf(
		"card %s: MPS serves again on the card, and takes programs of container %s", card, o.Container)
}

// settleOwed takes off what was said, and what concerns nobody any more, and reports whether
// that was anything.
func (a *Agent) settleOwed(said map[string][]owed) (any bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for card, list := range a.owed {
		m := a.mps.cards[card]
		left := slices.DeleteFunc(slices.Clone(list), func(o owed) bool {
			_, there := a.pods[o.UID]
			return slices.Contains(said[card], o) || a.watched && !there || !m.wanted && m.fault == "" && m.state.Idle() && a.stands
		})
		any = any || len(left) != len(list)
		if a.owed[card] = left; len(left) == 0 {
			delete(a.owed, card)
		}
	}
	return any
}
