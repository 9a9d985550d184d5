package lab

import (
	"fmt"
	"net/http"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// RESTConfig returns an administrator's client configuration that works outside
// of the lab: it dials into the lab's network.
func (l *Lab) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", l.config.path("kubernetes", "admin.conf"))
	if err != nil {
		return nil, fmt.Errorf("client of lab %s: %w", l.config.Name, err)
	}
	config.Dial = l.DialContext
	config.QPS, config.Burst = 1000, 1000
	return config, nil
}

// HTTPClient returns a client for addresses in the lab's network: those of the
// node, of pods and of Services, by IP.
func (l *Lab) HTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: l.DialContext}}
}
