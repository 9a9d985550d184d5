package pki_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/carve-gpu/carve/scheduler-extender/pki"
)

func newBundle(t *testing.T, client string) pki.Bundle {
	t.Helper()
	b, err := pki.NewBundle(client, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// handshake connects client and server over a pipe and returns the client's
// view and what the server saw.
func handshake(t *testing.T, server, client *tls.Config) (tls.ConnectionState, error, error) {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	deadline := time.Now().Add(10 * time.Second)
	if err := a.SetDeadline(deadline); err != nil {
		t.Fatal(err)
	}
	if err := b.SetDeadline(deadline); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		s := tls.Server(a, server)
		err := s.Handshake()
		if err == nil {
			_, err = s.Write([]byte("x"))
		} else {
			a.Close()
		}
		done <- err
	}()
	c := tls.Client(b, client)
	err := c.Handshake()
	if err == nil {
		// With TLS 1.3 the client learns of a refused certificate when it reads.
		_, err = c.Read(make([]byte, 1))
	}
	b.Close()
	return c.ConnectionState(), err, <-done
}

func clientConfig(t *testing.T, ca, of pki.Bundle, name string) *tls.Config {
	t.Helper()
	cert, err := tls.X509KeyPair(of.ClientCert, of.ClientKey)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca.CACert)
	return &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{cert}, ServerName: name}
}

func TestServerAndClientKnowEachOther(t *testing.T) {
	b := newBundle(t, "kube-scheduler")
	s, err := pki.NewServer(b, []string{"localhost", "10.1.2.3"}, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"localhost", "10.1.2.3"} {
		if _, cerr, serr := handshake(t, s.TLS(), clientConfig(t, b, b, name)); cerr != nil || serr != nil {
			t.Fatalf("%s: %v, %v", name, cerr, serr)
		}
	}
	if _, err, _ := handshake(t, s.TLS(), clientConfig(t, b, b, "10.1.2.4")); err == nil {
		t.Fatal("a name that the certificate isn't for was accepted")
	}
	s.SetNames(append(s.Names(), "10.1.2.4"))
	if _, cerr, serr := handshake(t, s.TLS(), clientConfig(t, b, b, "10.1.2.4")); cerr != nil || serr != nil {
		t.Fatalf("after SetNames: %v, %v", cerr, serr)
	}
}

func TestStrangersAreRefused(t *testing.T) {
	b, other := newBundle(t, "kube-scheduler"), newBundle(t, "kube-scheduler")
	s, err := pki.NewServer(b, []string{"localhost"}, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	none := clientConfig(t, b, b, "localhost")
	none.Certificates = nil
	old := clientConfig(t, b, b, "localhost")
	old.MaxVersion = tls.VersionTLS11
	for name, c := range map[string]*tls.Config{
		"no certificate":                none,
		"a certificate of another CA":   clientConfig(t, b, other, "localhost"),
		"a version of TLS that is weak": old,
	} {
		if _, cerr, serr := handshake(t, s.TLS(), c); cerr == nil || serr == nil {
			t.Errorf("%s: %v, %v", name, cerr, serr)
		}
	}
	// The server's own certificate is no client's.
	leaf, err := s.TLS().GetCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	c := clientConfig(t, b, b, "localhost")
	c.Certificates = []tls.Certificate{*leaf}
	if _, cerr, serr := handshake(t, s.TLS(), c); cerr == nil || serr == nil {
		t.Errorf("the server's certificate: %v, %v", cerr, serr)
	}
}

func TestServerCertificatesAreReplacedInTime(t *testing.T) {
	now := time.Now()
	b, err := pki.NewBundle("kube-scheduler", now)
	if err != nil {
		t.Fatal(err)
	}
	s, err := pki.NewServer(b, []string{"localhost"}, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	c := s.TLS()
	leaf := func() *x509.Certificate {
		l, err := c.GetCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		x, err := x509.ParseCertificate(l.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	first := leaf()
	if !leaf().Equal(first) {
		t.Fatal("a new certificate for each connection")
	}
	// For nine years there is a valid one at each moment.
	for range 9 * 52 {
		now = now.Add(7 * 24 * time.Hour)
		if l := leaf(); now.Before(l.NotBefore) || now.Add(9*24*time.Hour).After(l.NotAfter) {
			t.Fatalf("at %v the certificate is valid from %v to %v", now, l.NotBefore, l.NotAfter)
		}
	}
	if leaf().Equal(first) {
		t.Fatal("never replaced")
	}
	now = now.Add(3 * 365 * 24 * time.Hour)
	if _, err := pki.NewServer(b, nil, func() time.Time { return now }); err == nil {
		t.Fatal("a CA that ended was taken")
	}
}

func TestSecretIsMadeOnce(t *testing.T) {
	kube := fake.NewClientset()
	const callers = 8
	got := make([]pki.Bundle, callers)
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			b, err := pki.FromSecret(t.Context(), kube, "carve-system", "tls", "kube-scheduler", time.Now())
			if err != nil {
				t.Error(err)
			}
			got[i] = b
		})
	}
	all.Wait()
	for _, b := range got {
		if !bytes.Equal(b.CACert, got[0].CACert) || !bytes.Equal(b.ClientKey, got[0].ClientKey) || len(b.CAKey) == 0 {
			t.Fatal("callers got different certificates")
		}
	}
}

func TestABrokenSecretIsNamed(t *testing.T) {
	kube := fake.NewClientset(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "carve-system", Name: "tls"}, Data: map[string][]byte{"ca.crt": []byte("x"), "client.crt": []byte("x")}})
	_, err := pki.FromSecret(t.Context(), kube, "carve-system", "tls", "kube-scheduler", time.Now())
	if err == nil || !strings.Contains(err.Error(), "carve-system/tls: ca.key is missing") {
		t.Fatalf("error %v", err)
	}
	b := newBundle(t, "kube-scheduler")
	b.CAKey = newBundle(t, "kube-scheduler").CAKey
	if _, err := pki.NewServer(b, nil, time.Now); err == nil || !strings.Contains(err.Error(), "belong together") {
		t.Fatalf("error %v", err)
	}
	for _, change := range []func(b *pki.Bundle){
		func(b *pki.Bundle) { b.CACert = []byte("junk") },
		func(b *pki.Bundle) { b.CAKey = []byte("junk") },
		func(b *pki.Bundle) { b.CAKey = b.CACert },
		func(b *pki.Bundle) { b.CACert = b.CAKey },
	} {
		b := newBundle(t, "kube-scheduler")
		change(&b)
		if _, err := pki.NewServer(b, nil, time.Now); err == nil {
			t.Fatal("junk was taken")
		}
	}
}

func TestFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	const callers = 8
	got := make([]pki.Bundle, callers)
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			b, err := pki.FromDir(dir, "kube-scheduler", time.Now())
			if err != nil {
				t.Error(err)
			}
			got[i] = b
		})
	}
	all.Wait()
	for _, b := range got {
		if !bytes.Equal(b.CACert, got[0].CACert) || !bytes.Equal(b.ClientKey, got[0].ClientKey) {
			t.Fatal("callers got different certificates")
		}
	}
	for _, name := range []string{pki.CAKey, pki.ClientKey} {
		s, err := os.Stat(filepath.Join(dir, name))
		if err != nil || s.Mode().Perm() != 0o600 {
			t.Fatalf("%s: %v, %v", name, s, err)
		}
	}
	out := filepath.Join(t.TempDir(), "out")
	if err := got[0].WriteClient(out); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(out)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if err != nil || !slices.Equal(names, []string{"ca.crt", "client.crt", "client.key"}) {
		t.Fatalf("files %v, %v", names, err)
	}
	if err := os.Remove(filepath.Join(dir, pki.CAKey)); err != nil {
		t.Fatal(err)
	}
	if _, err := pki.FromDir(dir, "kube-scheduler", time.Now()); err == nil || !strings.Contains(err.Error(), "ca.key is missing") {
		t.Fatalf("error %v", err)
	}
}

// A leaf that ends while the server runs is replaced before, on the same listener,
// and one that no client certificate is asked for is as good as the other.
func TestShortLivedLeafIsReplacedInService(t *testing.T) {
	b := newBundle(t, "kube-scheduler")
	now := time.Now()
	s, err := pki.NewServer(b, []string{"carve-webhook.carve-system.svc"}, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	s.SetLife(time.Minute)
	server := s.Public()
	client := clientConfig(t, b, b, "carve-webhook.carve-system.svc")
	client.Certificates = nil
	client.Time = func() time.Time { return now }
	seen := map[string]bool{}
	for range 20 {
		state, cerr, serr := handshake(t, server, client)
		if cerr != nil || serr != nil {
			t.Fatalf("at %v: %v, %v", now, cerr, serr)
		}
		leaf := state.PeerCertificates[0]
		if left := leaf.NotAfter.Sub(now); left > time.Minute || left < 19*time.Second {
			t.Fatalf("a leaf with %v left", left)
		}
		seen[leaf.SerialNumber.String()] = true
		now = now.Add(25 * time.Second)
	}
	if len(seen) < 8 {
		t.Errorf("%d leaves in eight minutes", len(seen))
	}
}
