package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/manifests"
	"github.com/carve-gpu/carve/scheduler-extender/doctor"
)

// clusterDoctorOptions are the flags of doctor for a cluster.
type clusterDoctorOptions struct{ namespace, schedulerConfig string }

func (o *clusterDoctorOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.namespace, "carve-namespace", defaultNamespace(), "namespace that carve is installed in")
	f.StringVar(&o.schedulerConfig, "scheduler-config", "", "look into this KubeSchedulerConfiguration, too")
}

func clusterFindings(ctx context.Context, k *kubeFlags, o clusterDoctorOptions) ([]api.Finding, error) {
	kube, reports, err := k.clients()
	if err != nil {
		return nil, err
	}
	// Asked first, so that a cluster that doesn't answer is one error.
	if _, err := kube.Discovery().ServerVersion(); err != nil {
		return nil, fmt.Errorf("reach the API server: %w", err)
	}
	expected, err := doctor.Expect(manifests.Files, o.namespace)
	if err != nil {
		return nil, err
	}
	c := doctor.Config{Kube: kube, Reports: reports, Namespace: o.namespace, Version: buildVersion(), Expected: expected, Now: time.Now()}
	if o.schedulerConfig != "" {
		c.SchedulerConfigPath = o.schedulerConfig
		if c.SchedulerConfig, err = os.ReadFile(o.schedulerConfig); err != nil {
			return nil, fmt.Errorf("read the scheduler's configuration: %w", err)
		}
	}
	return doctor.Check(doctor.Gather(ctx, c)), nil
}
