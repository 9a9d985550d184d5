package lab

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Config says what Up starts. The zero value is a lab named carve.
type Config struct {
	// Name tells labs of one machine apart: lower-case letters, digits and
	// dashes, 32 characters at most. Default: carve.
	Name string `json:"name"`
	// Dir is the lab's folder, made by Up and removed by Down. Default:
	// carve/lab/<Name> in the user's cache folder. It must be on a file system
	// that can be an overlay's upper layer, and outside the folders that are
	// private in the lab (see PrivateDirs).
	Dir string `json:"dir"`
	// Programs is the folder that Build returned.
	Programs string `json:"programs"`
	// Binds are folders or files of the machine that the lab shows elsewhere.
	Binds []Bind `json:"binds,omitempty"`
	// SchedulerConfig is a KubeSchedulerConfiguration file to start
	// kube-scheduler with, read once. Paths in it are paths in the lab;
	// /etc/kubernetes/scheduler.conf is its kubeconfig. Empty: the default
	// scheduler.
	SchedulerConfig string `json:"-"`
	// Audit is a group of users whose writes the API server logs to AuditLog.
	// Empty: none.
	Audit string `json:"audit,omitempty"`
	// NRIOff switches the container runtime's plugin interface off, as containerd
	// 1.7 ships it. See UseNRI.
	NRIOff bool `json:"nriOff,omitempty"`
	// Node is the lab's node. Zero fields get defaults.
	Node Node `json:"node"`
}

// Node is a machine of the lab as Kubernetes sees it.
type Node struct {
	// Name of the Node object and host name in the lab. Default: node1.
	Name string `json:"name"`
	// Address with the length of the node network. Default: 10.88.0.1/16.
	Address netip.Prefix `json:"address"`
	// Pods is the network of this node's pods. Default: 10.89.0.0/24.
	Pods netip.Prefix `json:"pods"`
}

// IP returns the node's address.
func (n Node) IP() string { return n.Address.Addr().String() }

// Bind shows Source, a path of the machine, at Target in the lab. Target is made
// if it is missing and lies in a folder that is private to the lab.
type Bind struct {
	Source string `json:"source"`
	Target string `json:"target"`
}

// ParseBind reads SOURCE:TARGET.
func ParseBind(s string) (Bind, error) {
	source, target, ok := strings.Cut(s, ":")
	if !ok || !filepath.IsAbs(target) || source == "" || strings.Contains(target, ":") {
		return Bind{}, fmt.Errorf("bind %q: want SOURCE:TARGET, TARGET an absolute path in the lab", s)
	}
	source, err := filepath.Abs(source)
	if err != nil {
		return Bind{}, fmt.Errorf("bind %q: %w", s, err)
	}
	return Bind{Source: source, Target: filepath.Clean(target)}, nil
}

// AuditLog is where the API server of a lab with Config.Audit logs writes, one
// JSON object a line, before it answers them.
const AuditLog = "/var/log/kubernetes/audit.log"

// PrivateDirs are the folders whose content is the lab's own: writes there are
// never seen outside. /run starts empty, the others start as on the machine.
func PrivateDirs() []string { return append([]string{"/run"}, overlaid...) }

var overlaid = []string{"/etc", "/opt", "/var/lib", "/var/log"}

const (
	// clusterPods holds every node's pod network.
	clusterPods = "10.89.0.0/16"
	// services is the ClusterIP range; its first address is the API server's.
	services  = "10.96.0.0/16"
	serviceIP = "10.96.0.1"
	apiPort   = "6443"
)

var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

// complete fills in defaults and checks what was given.
func (c Config) complete() (Config, error) {
	if c.Name == "" {
		c.Name = "carve"
	}
	var faults []error
	if !namePattern.MatchString(c.Name) {
		faults = append(faults, fmt.Errorf("name %q: want lower-case letters, digits and dashes, 32 at most", c.Name))
	}
	if c.Dir == "" {
		dir, err := DefaultDir(c.Name)
		if err != nil {
			return c, err
		}
		c.Dir = dir
	}
	if c.Programs == "" {
		faults = append(faults, errors.New("programs: no folder given; Build returns one"))
	}
	for _, p := range []*string{&c.Dir, &c.Programs} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			return c, err
		}
		// Overlay options are separated by commas and layers by colons.
		if strings.ContainsAny(abs, ",:\\") {
			faults = append(faults, fmt.Errorf("path %s: must not contain a comma, colon or backslash", abs))
		}
		if private := privateParent(abs); private != "" {
			faults = append(faults, fmt.Errorf("path %s: lies in %s, which is private inside the lab; choose another folder (--dir, %s)", abs, private, cacheVariable))
		}
		*p = abs
	}
	if c.Node.Name == "" {
		c.Node.Name = "node1"
	}
	if !c.Node.Address.IsValid() {
		c.Node.Address = netip.MustParsePrefix("10.88.0.1/16")
	}
	if !c.Node.Pods.IsValid() {
		c.Node.Pods = netip.MustParsePrefix("10.89.0.0/24")
	}
	if !netip.MustParsePrefix(clusterPods).Overlaps(c.Node.Pods) || c.Node.Pods.Bits() < 16 {
		faults = append(faults, fmt.Errorf("node %s: pods %s: want a part of %s", c.Node.Name, c.Node.Pods, clusterPods))
	}
	for _, b := range c.Binds {
		if _, err := os.Stat(b.Source); err != nil {
			faults = append(faults, fmt.Errorf("bind %s:%s: %w", b.Source, b.Target, err))
		}
	}
	if err := errors.Join(faults...); err != nil {
		return c, fmt.Errorf("lab %s: %w", c.Name, err)
	}
	return c, nil
}

// DefaultDir returns the folder of the lab with this name.
func DefaultDir(name string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("folder of lab %s: %w (name one with --dir)", name, err)
	}
	return filepath.Join(cache, "carve", "lab", name), nil
}

func privateParent(path string) string {
	for _, dir := range PrivateDirs() {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return dir
		}
	}
	return ""
}

// The lab's folder. What lies in node is seen in the lab at the usual places.
func (c Config) path(elem ...string) string {
	return filepath.Join(append([]string{c.Dir}, elem...)...)
}

func (c Config) program(name string) string { return filepath.Join(c.Programs, name) }

// cgroup is the lab's folder in every cgroup hierarchy: named after the lab's
// own folder, so that it can be found when nothing else is left of the lab.
func (c Config) cgroup() string {
	sum := sha256.Sum256([]byte(c.Dir))
	return "carve-lab-" + hex.EncodeToString(sum[:6])
}
