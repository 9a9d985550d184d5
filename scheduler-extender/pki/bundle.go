package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"time"
)

// Names of a bundle's parts, as files and as keys of the Secret.
const (
	CACert     = "ca.crt"
	CAKey      = "ca.key"
	ClientCert = "client.crt"
	ClientKey  = "client.key"
)

const (
	longLife = 10 * 365 * 24 * time.Hour
	// skew is how far the clocks of client and server may differ.
	skew = time.Hour
)

// Bundle is a CA and the scheduler's certificate, in PEM.
type Bundle struct {
	CACert, CAKey, ClientCert, ClientKey []byte
}

// NewBundle makes a CA and a client certificate with the given common name.
func NewBundle(client string, now time.Time) (Bundle, error) {
	var b Bundle
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return b, fmt.Errorf("make the CA: %w", err)
	}
	ca := &x509.Certificate{
		Subject:   pkix.Name{CommonName: "carve-extender-ca"},
		NotBefore: now.Add(-skew), NotAfter: now.Add(longLife),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
	}
	der, err := sign(ca, ca, caKey.Public(), caKey)
	if err != nil {
		return b, fmt.Errorf("make the CA: %w", err)
	}
	if ca, err = x509.ParseCertificate(der); err != nil {
		return b, fmt.Errorf("make the CA: %w", err)
	}
	b.CACert = encode("CERTIFICATE", der)
	if b.CAKey, err = encodeKey(caKey); err != nil {
		return b, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return b, fmt.Errorf("make the client certificate: %w", err)
	}
	leaf := &x509.Certificate{
		Subject:   pkix.Name{CommonName: client, Organization: []string{"carve"}},
		NotBefore: now.Add(-skew), NotAfter: ca.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if der, err = sign(leaf, ca, key.Public(), caKey); err != nil {
		return b, fmt.Errorf("make the client certificate: %w", err)
	}
	b.ClientCert = encode("CERTIFICATE", der)
	b.ClientKey, err = encodeKey(key)
	return b, err
}

func sign(c, parent *x509.Certificate, public crypto.PublicKey, signer crypto.Signer) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	c.SerialNumber = serial
	return x509.CreateCertificate(rand.Reader, c, parent, public, signer)
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func encodeKey(k *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return encode("PRIVATE KEY", der), nil
}

// parts maps names to contents.
func (b Bundle) parts() map[string][]byte {
	return map[string][]byte{CACert: b.CACert, CAKey: b.CAKey, ClientCert: b.ClientCert, ClientKey: b.ClientKey}
}

// bundle is the inverse of parts; a part that is missing is an error.
func bundle(parts map[string][]byte) (Bundle, error) {
	b := Bundle{parts[CACert], parts[CAKey], parts[ClientCert], parts[ClientKey]}
	for _, name := range []string{CACert, CAKey, ClientCert, ClientKey} {
		if len(parts[name]) == 0 {
			return Bundle{}, fmt.Errorf("%s is missing", name)
		}
	}
	return b, nil
}

// parse reads the CA of a bundle.
func (b Bundle) parse() (*x509.Certificate, crypto.Signer, error) {
	certBlock, _ := pem.Decode(b.CACert)
	if certBlock == nil {
		return nil, nil, errors.New(CACert + " is not PEM")
	}
	cert, err := x509.ParseCertificate(certBlock.Bytes)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", CACert, err)
	}
	keyBlock, _ := pem.Decode(b.CAKey)
	if keyBlock == nil {
		return nil, nil, errors.New(CAKey + " is not PEM")
	}
	k, err := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", CAKey, err)
	}
	signer, ok := k.(crypto.Signer)
	if !ok {
		return nil, nil, fmt.Errorf("%s: a key of type %T can't sign", CAKey, k)
	}
	if pub, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !pub.Equal(cert.PublicKey) {
		return nil, nil, fmt.Errorf("%s and %s don't belong together", CACert, CAKey)
	}
	return cert, signer, nil
}
