package main

import (
	"errors"
	"os"

	"github.com/spf13/pflag"
)

// leaderOptions are the flags of who answers where several extenders run.
type leaderOptions struct {
	elect bool
	lease string
	pod   string
}

func (l *leaderOptions) flags(f *pflag.FlagSet) {
	f.BoolVar(&l.elect, "leader-elect", true, "answer only while this process holds the lease, and stand by otherwise; false where no other extender can ever run")
	f.StringVar(&l.lease, "lease", "carve-extender", "Lease that says who answers")
	f.StringVar(&l.pod, "pod", os.Getenv("POD_NAME"), "name of the pod that this process is in ($POD_NAME), whose label carve.dev/leading sends the Service's callers here")
}

func (l *leaderOptions) check() error {
	if l.elect && l.pod == "" {
		return errors.New("--pod: the pod's name is needed ($POD_NAME) to lead among several extenders; outside of a cluster say --leader-elect=false")
	}
	return nil
}
