package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
)

// leafLife is how long a server certificate is valid; it is replaced when a
// third of that is left.
const leafLife = 30 * 24 * time.Hour

// Server hands out TLS settings whose certificate is renewed in memory. It is
// safe for concurrent use.
type Server struct {
	ca     *x509.Certificate
	signer crypto.Signer
	now    func() time.Time
	life   time.Duration

	mu    sync.Mutex
	names []string
	leaf  *tls.Certificate
	renew time.Time
}

// NewServer makes a server for the given host names and IP addresses.
func NewServer(b Bundle, names []string, now func() time.Time) (*Server, error) {
	ca, signer, err := b.parse()
	if err != nil {
		return nil, fmt.Errorf("read the certificates: %w", err)
	}
	if t := now(); t.After(ca.NotAfter) {
		return nil, fmt.Errorf("the CA ended on %s: delete the stored certificates, restart, and hand out the scheduler's credentials anew", ca.NotAfter.Format(time.DateOnly))
	}
	return &Server{ca: ca, signer: signer, now: now, life: leafLife, names: slices.Clone(names)}, nil
}

// SetLife makes certificates from now on end after d, which is a month otherwise.
func (s *Server) SetLife(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.life, s.leaf = d, nil
}

// SetNames changes the names; connections from now on see a certificate for
// them.
func (s *Server) SetNames(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.names, names) {
		s.names, s.leaf = slices.Clone(names), nil
	}
}

// Names are those that the certificate is for.
func (s *Server) Names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.names)
}

// TLS demands a client certificate of the CA. Whose it is, is for the handler
// to check.
func (s *Server) TLS() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(s.ca)
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		ClientAuth:     tls.RequireAndVerifyClientCert,
		ClientCAs:      pool,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.certificate() },
		NextProtos:     []string{"h2", "http/1.1"},
	}
}

// Public asks no client for a certificate: for a server whose answers are no
// secret and change nothing.
func (s *Server) Public() *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.certificate() },
		NextProtos:     []string{"h2", "http/1.1"},
	}
}

func (s *Server) certificate() (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if s.leaf != nil && now.Before(s.renew) {
		return s.leaf, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a server certificate: %w", err)
	}
	end := now.Add(s.life)
	if end.After(s.ca.NotAfter) {
		end = s.ca.NotAfter
	}
	c := &x509.Certificate{
		Subject:   pkix.Name{CommonName: "carve-extender"},
		NotBefore: now.Add(-skew), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, n := range s.names {
		if ip := net.ParseIP(n); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, n)
		}
	}
	der, err := sign(c, s.ca, key.Public(), s.signer)
	if err != nil {
		return nil, fmt.Errorf("make a server certificate: %w", err)
	}
	s.leaf = &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	s.renew = now.Add(end.Sub(now) * 2 / 3)
	return s.leaf, nil
}
