package lab

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// authority signs certificates. Everything lives as long as the lab at most, so
// keys are made anew with each lab and are never renewed.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
	dir  string
}

const certificateLife = 10 * 365 * 24 * time.Hour

func newAuthority(dir, name string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{key: key, dir: dir}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := a.sign(template, template, &key.PublicKey)
	if err != nil {
		return nil, err
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(filepath.Join(dir, name+".crt"), a.pem, 0o644); err != nil {
		return nil, err
	}
	return a, writeKey(filepath.Join(dir, name+".key"), key)
}

func (a *authority) sign(template, parent *x509.Certificate, public crypto.PublicKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 126))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(certificateLife)
	return x509.CreateCertificate(rand.Reader, template, parent, public, a.key)
}

// identity is a certificate and key for a client, and a server where names says
// under which host names and addresses.
type identity struct {
	file, user string
	groups     []string
	names      []string
}

// issue writes file.crt and file.key and returns both as PEM.
func (a *authority) issue(id identity) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: id.user, Organization: id.groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	for _, name := range id.names {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	der, err := a.sign(template, a.cert, &private.PublicKey)
	if err != nil {
		return nil, nil, err
	}
	cert = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(filepath.Join(a.dir, id.file+".crt"), cert, 0o644); err != nil {
		return nil, nil, err
	}
	path := filepath.Join(a.dir, id.file+".key")
	if err := writeKey(path, private); err != nil {
		return nil, nil, err
	}
	key, err = os.ReadFile(path)
	return cert, key, err
}

func writeKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
}

// writePKI fills the folder that the lab sees as /etc/kubernetes: certificates
// in pki, and one kubeconfig for each client, named as kubeadm names them.
func (c Config) writePKI() error {
	if err := c.writeCertificates(); err != nil {
		return fmt.Errorf("make certificates: %w", err)
	}
	return nil
}

func (c Config) writeCertificates() error {
	dir := c.path("kubernetes", "pki")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	ca, err := newAuthority(dir, "ca")
	if err != nil {
		return err
	}
	frontProxy, err := newAuthority(dir, "front-proxy-ca")
	if err != nil {
		return err
	}
	if _, _, err := frontProxy.issue(identity{file: "front-proxy-client", user: "front-proxy-client"}); err != nil {
		return err
	}
	for _, id := range []identity{
		{file: "apiserver", user: "kube-apiserver", names: []string{
			"127.0.0.1", serviceIP, c.Node.IP(), "localhost", c.Node.Name,
			"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
		}},
		{file: "apiserver-kubelet-client", user: "kube-apiserver-kubelet-client", groups: []string{"system:masters"}},
	} {
		if _, _, err := ca.issue(id); err != nil {
			return err
		}
	}
	for _, id := range []identity{
		{file: "admin", user: "kubernetes-admin", groups: []string{"system:masters"}},
		{file: "controller-manager", user: "system:kube-controller-manager"},
		{file: "scheduler", user: "system:kube-scheduler"},
		{file: "kube-proxy", user: "system:kube-proxy"},
		{file: "kubelet", user: "system:node:" + c.Node.Name, groups: []string{"system:nodes"}, names: []string{c.Node.IP(), c.Node.Name}},
	} {
		cert, key, err := ca.issue(id)
		if err != nil {
			return err
		}
		kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
			Clusters:       map[string]*clientcmdapi.Cluster{"lab": {Server: c.apiURL(), CertificateAuthorityData: ca.pem}},
			AuthInfos:      map[string]*clientcmdapi.AuthInfo{id.user: {ClientCertificateData: cert, ClientKeyData: key}},
			Contexts:       map[string]*clientcmdapi.Context{"lab": {Cluster: "lab", AuthInfo: id.user}},
			CurrentContext: "lab",
		})
		if err != nil {
			return err
		}
		if err := os.WriteFile(c.path("kubernetes", id.file+".conf"), kubeconfig, 0o600); err != nil {
			return err
		}
	}
	// The key pair of service account tokens.
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "sa.pub"), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o644); err != nil {
		return err
	}
	return writeKey(filepath.Join(dir, "sa.key"), key)
}

func (c Config) apiURL() string { return "https://" + net.JoinHostPort(c.Node.IP(), apiPort) }
