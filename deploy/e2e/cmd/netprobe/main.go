// Command netprobe is what the lab's own tests run in pods: it asks the API
// server who it is with the pod's service account, serves HTTP and fetches
// URLs. Standard library only, so that its image is one static file.
//
//	netprobe whoami      print the user that the API server sees behind the mounted token
//	netprobe serve ADDR  answer every request with "hello from <hostname>"
//	netprobe get URL     print the body; exit status 1 unless the status is 2xx
package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "netprobe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "whoami":
		return whoami()
	case len(args) == 2 && args[0] == "serve":
		host, err := os.Hostname()
		if err != nil {
			return err
		}
		return http.ListenAndServe(args[1], http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, "hello from %s\n", host)
		}))
	case len(args) == 2 && args[0] == "get":
		request, err := http.NewRequest(http.MethodGet, args[1], nil)
		if err != nil {
			return err
		}
		return fetch(http.DefaultTransport, request)
	}
	return errors.New("usage: netprobe whoami | serve ADDR | get URL")
}

// whoami uses exactly what an in-cluster client uses: the KUBERNETES_SERVICE_*
// variables, the projected token and the projected CA.
func whoami() error {
	token, err := os.ReadFile(serviceAccount + "token")
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(serviceAccount + "ca.crt")
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return errors.New("no certificate in " + serviceAccount + "ca.crt")
	}
	url := "https://" + net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")) +
		"/apis/authentication.k8s.io/v1/selfsubjectreviews"
	request, err := http.NewRequest(http.MethodPost, url,
		strings.NewReader(`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	return fetch(&http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}, request)
}

func fetch(transport http.RoundTripper, request *http.Request) error {
	client := http.Client{Transport: transport, Timeout: 10 * time.Second}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		return err
	}
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: %s", request.Method, request.URL, response.Status)
	}
	return nil
}
