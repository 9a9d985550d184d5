package lab

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// component is a program of the lab that can be stopped and started on its own.
type component struct {
	name    string
	command func(Config) []string
	// ready fails as long as the program doesn't do its work.
	ready func(context.Context, *Lab) error
}

var components = []component{
	{"etcd", etcdCommand, healthy("http://127.0.0.1:2379/health")},
	{"apiserver", apiserverCommand, healthy("https://127.0.0.1:" + apiPort + "/readyz")},
	{"kcm", controllerManagerCommand, healthy("https://127.0.0.1:10257/healthz")},
	{"scheduler", schedulerCommand, healthy("https://127.0.0.1:10259/healthz")},
	{"kube-proxy", proxyCommand, healthy("http://127.0.0.1:10256/healthz")},
	{"containerd", containerdCommand, containerdReady},
	{"kubelet", kubeletCommand, healthy("http://127.0.0.1:10248/healthz")},
}

// Components returns the names that Stop, Start, Restart and Kill take.
func Components() []string {
	var names []string
	for _, c := range components {
		names = append(names, c.name)
	}
	return names
}

const pki = "/etc/kubernetes/pki/"

func etcdCommand(Config) []string {
	return []string{
		"etcd", "--data-dir=/var/lib/etcd", "--log-level=warn", "--unsafe-no-fsync",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=default=http://127.0.0.1:2380",
	}
}

func apiserverCommand(c Config) []string {
	var audit []string
	if c.Audit != "" {
		audit = []string{"--audit-policy-file=/etc/kubernetes/audit.yaml", "--audit-log-path=" + AuditLog, "--audit-log-mode=blocking"}
	}
	return append([]string{
		"kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--v=1", "--profiling=false",
		"--bind-address=0.0.0.0", "--secure-port=" + apiPort, "--advertise-address=" + c.Node.IP(),
		"--tls-cert-file=" + pki + "apiserver.crt", "--tls-private-key-file=" + pki + "apiserver.key",
		"--client-ca-file=" + pki + "ca.crt",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
		"--service-cluster-ip-range=" + services,
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + pki + "sa.pub", "--service-account-signing-key-file=" + pki + "sa.key",
		// To kubelets: logs and exec.
		"--kubelet-client-certificate=" + pki + "apiserver-kubelet-client.crt",
		"--kubelet-client-key=" + pki + "apiserver-kubelet-client.key",
		"--kubelet-certificate-authority=" + pki + "ca.crt", "--kubelet-preferred-address-types=InternalIP",
		// To aggregated API servers.
		"--requestheader-client-ca-file=" + pki + "front-proxy-ca.crt", "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + pki + "front-proxy-client.crt", "--proxy-client-key-file=" + pki + "front-proxy-client.key",
		"--enable-aggregator-routing",
		// Otherwise a stop waits a minute for clients to end their watches.
		"--shutdown-watch-termination-grace-period=1s",
	}, audit...)
}

func controllerManagerCommand(c Config) []string {
	const conf = "/etc/kubernetes/controller-manager.conf"
	return []string{
		"kube-controller-manager", "--v=1", "--bind-address=127.0.0.1", "--leader-elect=false",
		"--kubeconfig=" + conf, "--authentication-kubeconfig=" + conf, "--authorization-kubeconfig=" + conf,
		"--requestheader-client-ca-file=" + pki + "front-proxy-ca.crt", "--client-ca-file=" + pki + "ca.crt",
		"--use-service-account-credentials", "--service-account-private-key-file=" + pki + "sa.key",
		"--root-ca-file=" + pki + "ca.crt",
		"--cluster-signing-cert-file=" + pki + "ca.crt", "--cluster-signing-key-file=" + pki + "ca.key",
		"--kube-api-qps=1000", "--kube-api-burst=1000",
	}
}

func schedulerCommand(Config) []string {
	const conf = "/etc/kubernetes/scheduler.conf"
	return []string{
		"kube-scheduler", "--v=2", "--bind-address=127.0.0.1", "--config=/etc/kubernetes/scheduler.yaml",
		"--authentication-kubeconfig=" + conf, "--authorization-kubeconfig=" + conf,
		// There is but one: it need not wait for a dead predecessor's lease.
		"--leader-elect=false",
	}
}

func proxyCommand(c Config) []string {
	return []string{"kube-proxy", "--v=1", "--config=/etc/kubernetes/kube-proxy.yaml", "--hostname-override=" + c.Node.Name}
}

func containerdCommand(Config) []string {
	return []string{"containerd", "--config=/etc/kubernetes/containerd.toml"}
}

func kubeletCommand(c Config) []string {
	return []string{
		"kubelet", "--v=2", "--config=/etc/kubernetes/kubelet.yaml", "--kubeconfig=/etc/kubernetes/kubelet.conf",
		"--hostname-override=" + c.Node.Name, "--node-ip=" + c.Node.IP(),
	}
}

func containerdReady(ctx context.Context, l *Lab) error {
	// Answered by containerd itself: the socket is open before the server serves.
	_, err := l.Output(ctx, "ctr", "version")
	return err
}

// healthy returns a check for a 200 of an address in the lab.
func healthy(url string) func(context.Context, *Lab) error {
	return func(ctx context.Context, l *Lab) error {
		ctx, cancel := within(ctx, 2*time.Second)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		client := http.Client{Transport: &http.Transport{
			DialContext: l.DialContext, DisableKeepAlives: true,
			// Loopback of a namespace in which only the lab's programs run.
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		}}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", url, response.Status)
		}
		return nil
	}
}

func find(name string) (component, error) {
	i := slices.IndexFunc(components, func(c component) bool { return c.name == name })
	if i < 0 {
		return component{}, fmt.Errorf("component %q: there is none; want one of %s", name, strings.Join(Components(), " "))
	}
	return components[i], nil
}

// launch starts the program, detached from this process, with its output
// appended to the component's log.
func (l *Lab) launch(c component) (process, error) {
	log, err := os.OpenFile(l.LogFile(c.name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return process{}, fmt.Errorf("start %s: %w", c.name, err)
	}
	defer log.Close()
	argv := c.command(l.config)
	cmd := exec.Command(l.config.program(argv[0]), argv[1:]...)
	cmd.Env, cmd.Dir = l.config.environment(), "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := l.Start(cmd); err != nil {
		return process{}, fmt.Errorf("start %s: %w", c.name, err)
	}
	p, err := identify(cmd.Process.Pid)
	go cmd.Wait() // the lab's process 1 reaps it once this process is gone
	if err != nil {
		return p, fmt.Errorf("start %s: %w", c.name, err)
	}
	return p, nil
}

// await waits until the component is ready. It fails early when the process
// ends; the error then holds the end of its log.
func (l *Lab) await(outer context.Context, c component, p process) error {
	ctx, cancel := within(outer, 90*time.Second)
	defer cancel()
	for {
		ended := !p.alive()
		err := c.ready(ctx, l)
		switch {
		case err == nil && !ended:
			return nil
		case ended:
			return l.failure(c.name, errors.New("the process ended"))
		case outer.Err() != nil:
			return fmt.Errorf("%s: %w", c.name, context.Cause(outer)) // nothing is wrong with it
		case ctx.Err() != nil:
			return l.failure(c.name, fmt.Errorf("not ready: %w: %w", context.Cause(ctx), err))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// failure explains with the end of the component's log.
func (l *Lab) failure(name string, cause error) error {
	path := l.LogFile(name)
	return fmt.Errorf("%s: %w\nthe end of its log %s:\n%s", name, cause, path, tail(path, 15))
}

func tail(path string, lines int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return "  (" + err.Error() + ")"
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	for i, line := range all {
		if len(line) > 400 {
			line = line[:400] + "…"
		}
		all[i] = "  | " + line
	}
	return strings.Join(all, "\n")
}

// LogFile returns the log of a component.
func (l *Lab) LogFile(name string) string { return l.config.path("log", name+".log") }

// Stop ends a component with SIGTERM and waits for its end.
func (l *Lab) Stop(ctx context.Context, name string) error { return l.end(ctx, name, unix.SIGTERM) }

// Kill ends a component with SIGKILL and waits for its end.
func (l *Lab) Kill(ctx context.Context, name string) error { return l.end(ctx, name, unix.SIGKILL) }

func (l *Lab) end(ctx context.Context, name string, signal unix.Signal) error {
	if _, err := find(name); err != nil {
		return err
	}
	ctx, cancel := within(ctx, 60*time.Second)
	defer cancel()
	return l.change(ctx, func() error {
		if err := l.state.Components[name].end(ctx, signal); err != nil {
			return fmt.Errorf("stop %s of lab %s: %w", name, l.config.Name, err)
		}
		return nil
	})
}

// StartComponent starts a component that was stopped and waits until it is
// ready. It is no error when it runs.
func (l *Lab) StartComponent(ctx context.Context, name string) error {
	c, err := find(name)
	if err != nil {
		return err
	}
	var p process
	err = l.change(ctx, func() (err error) {
		if p = l.state.Components[name]; p.alive() {
			return nil
		}
		p, err = l.launch(c)
		l.state.Components[name] = p
		return err
	})
	if err != nil {
		return err
	}
	return l.await(ctx, c, p)
}

// Restart is Stop and StartComponent.
func (l *Lab) Restart(ctx context.Context, name string) error {
	if err := l.Stop(ctx, name); err != nil {
		return err
	}
	return l.StartComponent(ctx, name)
}

// UseScheduler restarts kube-scheduler with this KubeSchedulerConfiguration. Its
// kubeconfig is /etc/kubernetes/scheduler.conf; other paths in it are the lab's,
// too, and see Config.Binds. Nil brings the default configuration back.
func (l *Lab) UseScheduler(ctx context.Context, configuration []byte) error {
	if configuration == nil {
		var err error
		if configuration, err = l.config.render("scheduler.yaml"); err != nil {
			return err
		}
	}
	if err := l.config.writeConfig("scheduler.yaml", configuration); err != nil {
		return err
	}
	return l.Restart(ctx, "scheduler")
}

// UseNRI restarts the container runtime with its plugin interface on or off.
func (l *Lab) UseNRI(ctx context.Context, on bool) error {
	l.config.NRIOff = !on
	configuration, err := l.config.render("containerd.toml")
	if err != nil {
		return err
	}
	if err := l.config.writeConfig("containerd.toml", configuration); err != nil {
		return err
	}
	return l.Restart(ctx, "containerd")
}

// Status says for each component whether its process runs.
type Status struct {
	Name, Dir string
	// Running: the namespaces exist. Ready: Up had finished.
	Running, Ready bool
	Holder         int
	API            string
	Components     []ComponentStatus
}

// ComponentStatus is a component's process, by its number outside the lab.
type ComponentStatus struct {
	Name    string
	PID     int
	Running bool
	Log     string
}

// Status reads the lab's state anew.
func (l *Lab) Status() (Status, error) {
	if err := l.load(); err != nil {
		return Status{}, err
	}
	s := Status{
		Name: l.config.Name, Dir: l.config.Dir, Running: l.state.Holder.alive(), Holder: l.state.Holder.PID,
		Ready: !l.state.Ready.IsZero(), API: "https://" + net.JoinHostPort(l.config.Node.IP(), apiPort),
	}
	for _, c := range components {
		p := l.state.Components[c.name]
		s.Components = append(s.Components, ComponentStatus{Name: c.name, PID: p.PID, Running: p.alive(), Log: l.LogFile(c.name)})
	}
	return s, nil
}
