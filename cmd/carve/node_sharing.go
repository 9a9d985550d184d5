package main

import (
	"log/slog"
	"path/filepath"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/deviceplugin/nvidiaconfig"
	"github.com/carve-gpu/carve/vgpu/agent"
)

// followSharing makes what follows NVIDIA's configuration, nil where there is none to
// follow. The agent that it tells is asked for with each call: it is made later.
func followSharing(o nodeOptions, of func() *agent.Agent, log *slog.Logger) *nvidiaconfig.Follower {
	if o.nvidiaConfig == "" {
		return nil
	}
	return nvidiaconfig.NewFollower(nvidiaconfig.FollowerConfig{
		Path: o.nvidiaConfig,
		Keep: filepath.Join(o.stateDir, "nvidia-config.json"),
		Log:  log,
		Cards: func() (out []nvidiaconfig.Card) {
			for _, c := range of().Cards() {
				out = append(out, nvidiaconfig.Card{Index: c.Index, UUID: c.UUID, Model: c.Model, Major: c.ComputeMajor, MemoryMiB: c.MemoryMiB(), MIG: c.MIGMode == "enabled"})
			}
			return out
		},
		Set: func(cards []nvidiaconfig.Card, sharing map[string]v1alpha1.Sharing) {
			uuids := make([]string, len(cards))
			for i, c := range cards {
				uuids[i] = c.UUID
			}
			of().SetSharing(uuids, sharing)
		},
		Changed: func(fault bool, sentence string) { of().SharingSaid(fault, sentence) },
	})
}

// nodeLabels hands on the label that chooses a file.
func nodeLabels(f *nvidiaconfig.Follower) func(map[string]string) {
	return func(labels map[string]string) { f.SetLabel(labels[api.LabelNVIDIAConfig]) }
}
