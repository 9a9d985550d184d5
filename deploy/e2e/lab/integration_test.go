package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/deploy/e2e/image"
)

// cluster is a running lab with a client, for the parts of TestLab.
type cluster struct {
	*Lab
	client *kubernetes.Clientset
}

// TestLab goes once through the life of a lab.
func TestLab(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("a lab needs root: run the tests as root")
	}
	progress := NewProgress(testWriter{t})
	programs, err := Build(t.Context(), module(t), progress)
	if err != nil {
		t.Fatal(err)
	}
	// Not t.TempDir: it must be a disk, and outlive a failure long enough to be read.
	dir, err := DefaultDir("integration-test")
	if err != nil {
		t.Fatal(err)
	}
	settings := readSettings(t)
	driver := t.TempDir()
	if err := unix.Mknod(filepath.Join(driver, "card0"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 7))); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	l, err := Up(t.Context(), Config{
		Name: "integration-test", Dir: dir, Programs: programs,
		Binds: []Bind{{Source: driver, Target: "/run/driver"}},
	}, progress)
	t.Cleanup(func() {
		if err := Down(context.Background(), dir, nil); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("up after %s", time.Since(begin).Round(time.Millisecond))
	config, err := l.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	c := cluster{l, client}
	c.importProbe(t)

	parts := []struct {
		name string
		run  func(*testing.T)
	}{
		{"a second up is refused", c.secondUp},
		{"another process attaches", c.attach},
		{"pods reach the API server by Service and token", c.whoami},
		{"Services are reachable from pods, node and test", c.services},
		{"mounts of a DaemonSet's pod reach the node", c.propagation},
		{"devices of a bound driver root open in the lab", c.devices},
		{"a policy on pods/binding refuses", c.bindingPolicy},
		{"the scheduler takes another configuration", c.otherScheduler},
		{"kubelet and containerd restart under running pods", c.restarts},
		{"every other component restarts", c.restartOthers},
		{"a component that doesn't start says why", c.failingComponent},
	}
	for _, p := range parts {
		if !t.Run(p.name, p.run) {
			t.Log(l.LogFile("kubelet") + " ends with\n" + tail(l.LogFile("kubelet"), 5))
		}
	}
	c.leavesNothing(t, settings)
}

// testWriter sends progress to the test's log.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(data []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(data), "\n"))
	return len(data), nil
}

func (c cluster) importProbe(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(dir, "netprobe"), modulePath+"/cmd/netprobe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	base, err := BaseLayer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m, err := image.Program("localhost/netprobe:1", base, filepath.Join(dir, "netprobe"))
	if err != nil {
		t.Fatal(err)
	}
	tar := filepath.Join(dir, "netprobe.tar")
	if err := m.WriteFile(tar); err != nil {
		t.Fatal(err)
	}
	if err := c.ImportImage(t.Context(), tar); err != nil {
		t.Fatal(err)
	}
}

func (c cluster) apply(t *testing.T, manifests string) {
	t.Helper()
	if err := c.Apply(t.Context(), manifests); err != nil {
		t.Fatal(err)
	}
}

// eventually calls f until it returns nil.
func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within a minute: %v", what, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// pod waits until a pod is in this phase, all containers ready if it is Running.
func (c cluster) pod(t *testing.T, name string, phase corev1.PodPhase) (pod *corev1.Pod) {
	t.Helper()
	eventually(t, "pod "+name+" "+string(phase), func() (err error) {
		if pod, err = c.client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		if pod.Status.Phase != phase {
			return fmt.Errorf("phase %s, %+v", pod.Status.Phase, pod.Status.ContainerStatuses)
		}
		for _, s := range pod.Status.ContainerStatuses {
			if phase == corev1.PodRunning && !s.Ready {
				return fmt.Errorf("container %s is not ready", s.Name)
			}
		}
		return nil
	})
	return pod
}

func (c cluster) log(t *testing.T, pod string) string {
	t.Helper()
	// Through API server and kubelet.
	data, err := c.client.CoreV1().Pods("default").GetLogs(pod, &corev1.PodLogOptions{}).DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func (c cluster) secondUp(t *testing.T) {
	_, err := Up(t.Context(), c.Config(), nil)
	if err == nil || !strings.Contains(err.Error(), "running") {
		t.Errorf("error %v, want a refusal", err)
	}
}

func (c cluster) attach(t *testing.T) {
	// The command, as another process.
	program := filepath.Join(t.TempDir(), "lab")
	cmd := exec.Command("go", "build", "-trimpath", "-o", program, modulePath+"/cmd/lab")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(program, append([]string{"--dir", c.Config().Dir}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("lab %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	if got := run("kubectl", "get", "node", "node1", "-o", "name"); got != "node/node1\n" {
		t.Errorf("lab kubectl printed %q", got)
	}
	if got := run("exec", "--", "cat", "/proc/1/comm", "/proc/sys/kernel/hostname"); got != "pause\nnode1\n" {
		t.Errorf("lab exec printed %q", got)
	}
	if got := run("status"); strings.Count(got, "running") != len(components) {
		t.Errorf("lab status printed %s", got)
	}
	if got := run("logs", "kubelet"); !strings.Contains(got, "kubelet") {
		t.Errorf("lab logs printed %q", got)
	}
	err := exec.Command(program, "--dir", c.Config().Dir, "exec", "--", "sh", "-c", "exit 7").Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("lab exec of a program that exits with 7: %v", err)
	}
	err = exec.Command(program, "--dir", c.Config().Dir, "restart", "nothing").Run()
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("lab restart of no component: %v", err)
	}
}

func (c cluster) whoami(t *testing.T) {
	for name, hostNetwork := range map[string]string{"whoami-pod": "false", "whoami-host": "true"} {
		c.apply(t, `{apiVersion: v1, kind: Pod, metadata: {name: `+name+`}, spec: {restartPolicy: Never, hostNetwork: `+hostNetwork+`,
		  containers: [{name: probe, image: "localhost/netprobe:1", args: [whoami]}]}}`)
	}
	for _, name := range []string{"whoami-pod", "whoami-host"} {
		c.pod(t, name, corev1.PodSucceeded)
		if got := c.log(t, name); !strings.Contains(got, `"username":"system:serviceaccount:default:default"`) {
			t.Errorf("%s: the API server answered %s", name, got)
		}
	}
}

func (c cluster) services(t *testing.T) {
	c.apply(t, `
apiVersion: v1
kind: Service
metadata: {name: hello}
spec: {selector: {app: hello}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: hello}
spec:
  selector: {matchLabels: {app: hello}}
  template:
    metadata: {labels: {app: hello}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: probe, image: "localhost/netprobe:1", args: [serve, ":8080"], readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}}]
`)
	service, err := c.client.CoreV1().Services("default").Get(t.Context(), "hello", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + service.Spec.ClusterIP
	get := func(client *http.Client, url string) error {
		response, err := client.Get(url)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			return err
		}
		if !strings.HasPrefix(string(body), "hello from hello-") {
			return fmt.Errorf("answer %q", body)
		}
		return nil
	}
	eventually(t, "the test reaches the Service", func() error { return get(c.HTTPClient(), url) })

	// And through a port of this machine's loopback.
	ctx, cancel := context.WithCancel(t.Context())
	addresses, ended := make(chan net.Addr, 1), make(chan error, 1)
	go func() {
		ended <- c.Forward(ctx, "127.0.0.1:0", net.JoinHostPort(service.Spec.ClusterIP, "80"), func(a net.Addr) { addresses <- a })
	}()
	plain := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	if err := get(plain, "http://"+(<-addresses).String()); err != nil {
		t.Errorf("forwarded: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("forwarding ended with %v", err)
	}
	// Without the lab's dialer the address leads nowhere.
	short := &http.Client{Timeout: time.Second}
	if err := get(short, url); err == nil {
		t.Error("the machine itself reaches the Service: the lab is not isolated")
	}

	c.apply(t, `
apiVersion: v1
kind: Pod
metadata: {name: get-from-pod}
spec: {restartPolicy: Never, containers: [{name: probe, image: "localhost/netprobe:1", args: [get, "`+url+`"]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: get-from-host}
spec: {restartPolicy: Never, hostNetwork: true, containers: [{name: probe, image: "localhost/netprobe:1", args: [get, "`+url+`"]}]}
`)
	for _, name := range []string{"get-from-pod", "get-from-host"} {
		c.pod(t, name, corev1.PodSucceeded)
		if got := c.log(t, name); !strings.HasPrefix(got, "hello from hello-") {
			t.Errorf("%s printed %q", name, got)
		}
	}
}

func (c cluster) propagation(t *testing.T) {
	c.apply(t, `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: mounter}
spec:
  selector: {matchLabels: {app: mounter}}
  template:
    metadata: {labels: {app: mounter}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: mounter
        image: localhost/busybox:1
        command: [sh, -c, "mkdir -p /shared/inner && mount -t tmpfs none /shared/inner && echo seen >/shared/inner/file && exec sleep 100000"]
        securityContext: {privileged: true}
        volumeMounts: [{name: shared, mountPath: /shared, mountPropagation: Bidirectional}]
      volumes: [{name: shared, hostPath: {path: /run/shared, type: DirectoryOrCreate}}]
`)
	eventually(t, "the DaemonSet's mount on the node", func() error {
		out, err := c.Output(t.Context(), "cat", "/run/shared/inner/file")
		if err == nil && string(out) != "seen\n" {
			err = fmt.Errorf("content %q", out)
		}
		return err
	})
	if data, err := os.ReadFile(c.Path("/run/shared/inner/file")); err != nil || string(data) != "seen\n" {
		t.Errorf("through Path: %q, %v", data, err)
	}
	if _, err := os.Stat("/run/shared"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the machine's /run has the lab's folder (%v)", err)
	}
	if out, err := c.Kubectl(t.Context(), "delete", "daemonset", "mounter", "--wait"); err != nil {
		t.Errorf("%s%v", out, err)
	}
}

func (c cluster) devices(t *testing.T) {
	// 1:7 is /dev/full: a write that fails with ENOSPC proves that it is the device.
	_, err := c.Output(t.Context(), "dd", "if=/dev/zero", "of=/run/driver/card0", "bs=1", "count=1")
	if err == nil || !strings.Contains(err.Error(), "No space left") {
		t.Errorf("writing to the device: %v, want ENOSPC", err)
	}
}

func (c cluster) bindingPolicy(t *testing.T) {
	c.apply(t, `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-mark}
spec:
  failurePolicy: Fail
  matchConstraints: {resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods/binding, bindings]}]}
  validations: [{expression: "!has(object.metadata.annotations) || !('example.org/mark' in object.metadata.annotations)", message: "marked bindings are refused"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-mark}
spec: {policyName: no-mark, validationActions: [Deny]}
---
apiVersion: v1
kind: Pod
metadata: {name: unbound}
spec: {schedulerName: nobody, terminationGracePeriodSeconds: 1, containers: [{name: c, image: "localhost/busybox:1", command: [sleep, "1000"]}]}
`)
	bind := func(annotations map[string]string) error {
		return c.client.CoreV1().Pods("default").Bind(t.Context(), &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: "unbound", Annotations: annotations},
			Target:     corev1.ObjectReference{Kind: "Node", Name: "node1"},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	}
	mark := map[string]string{"example.org/mark": "x"}
	// A policy takes a moment to be in force; until then the dry run passes.
	eventually(t, "the policy refuses", func() error {
		err := bind(mark)
		if apierrors.IsInvalid(err) && strings.Contains(err.Error(), "marked bindings are refused") {
			return nil
		}
		return fmt.Errorf("binding with the mark: %v", err)
	})
	if err := bind(nil); err != nil {
		t.Errorf("a binding without the mark: %v", err)
	}
}

func (c cluster) otherScheduler(t *testing.T) {
	manifest := func(name string) string {
		return `{apiVersion: v1, kind: Pod, metadata: {name: ` + name + `}, spec: {schedulerName: other, terminationGracePeriodSeconds: 1,
		  containers: [{name: c, image: "localhost/busybox:1", command: [sleep, "1000"]}]}}`
	}
	c.apply(t, manifest("for-other"))
	err := c.UseScheduler(t.Context(), []byte(`
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: /etc/kubernetes/scheduler.conf}
profiles: [{schedulerName: default-scheduler}, {schedulerName: other}]
`))
	if err != nil {
		t.Fatal(err)
	}
	c.pod(t, "for-other", corev1.PodRunning)
	if err := c.UseScheduler(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
}

func (c cluster) restarts(t *testing.T) {
	c.apply(t, `{apiVersion: v1, kind: Pod, metadata: {name: steady}, spec: {terminationGracePeriodSeconds: 1,
	  containers: [{name: c, image: "localhost/busybox:1", command: [sleep, "100000"]}]}}`)
	before := c.pod(t, "steady", corev1.PodRunning).Status.ContainerStatuses[0].ContainerID
	old := c.processOf(t, "containerd")
	for _, name := range []string{"kubelet", "containerd"} {
		if err := c.Restart(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Kill(t.Context(), "containerd"); err != nil {
		t.Fatal(err)
	}
	if now := c.processOf(t, "containerd"); now.Running || now.PID == old.PID {
		t.Errorf("after restart and kill containerd is %+v, it was %+v", now, old)
	}
	if err := c.StartComponent(t.Context(), "containerd"); err != nil {
		t.Fatal(err)
	}
	c.apply(t, `{apiVersion: v1, kind: Pod, metadata: {name: later}, spec: {restartPolicy: Never,
	  containers: [{name: c, image: "localhost/busybox:1", command: ["true"]}]}}`)
	c.pod(t, "later", corev1.PodSucceeded)
	status := c.pod(t, "steady", corev1.PodRunning).Status.ContainerStatuses[0]
	if status.ContainerID != before || status.RestartCount != 0 {
		t.Errorf("the running container did not survive: %s before, %s after %d restarts", before, status.ContainerID, status.RestartCount)
	}
}

func (c cluster) processOf(t *testing.T, name string) ComponentStatus {
	t.Helper()
	s, err := c.Status()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range s.Components {
		if p.Name == name {
			return p
		}
	}
	t.Fatalf("no component %s", name)
	return ComponentStatus{}
}

func (c cluster) restartOthers(t *testing.T) {
	for _, name := range []string{"kube-proxy", "kcm", "etcd", "apiserver"} {
		if err := c.Restart(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the API server answers", func() error {
		_, err := c.client.CoreV1().Nodes().Get(t.Context(), "node1", metav1.GetOptions{})
		return err
	})
}

func (c cluster) failingComponent(t *testing.T) {
	err := c.UseScheduler(t.Context(), []byte("kind: Nonsense\napiVersion: v1\n"))
	if err == nil || !strings.Contains(err.Error(), c.LogFile("scheduler")) || !strings.Contains(err.Error(), "Nonsense") {
		t.Errorf("error %v, want the log's path and its end", err)
	}
	if err := c.UseScheduler(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
}

// readSettings reads what the kubelet would write for the whole machine.
func readSettings(t *testing.T) map[string]string {
	t.Helper()
	values := map[string]string{}
	for name := range machineSettings {
		data, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			t.Fatal(err)
		}
		values[name] = string(data)
	}
	return values
}

func (c cluster) leavesNothing(t *testing.T, settings map[string]string) {
	dir, holder := c.Config().Dir, c.state.Holder.PID
	namespace := func(pid any) string {
		link, err := os.Readlink(fmt.Sprintf("/proc/%v/ns/pid", pid))
		if err != nil {
			return ""
		}
		return link
	}
	lab := namespace(holder)
	if lab == "" || lab == namespace("self") {
		t.Fatalf("the lab's PID namespace is %q", lab)
	}
	// As long as it is open, its number is no other namespace's.
	held, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", holder))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	begin := time.Now()
	if err := c.Down(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Logf("down after %s", time.Since(begin).Round(time.Millisecond))

	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		if namespace(filepath.Base(p)) == lab {
			command, _ := os.ReadFile(p + "/cmdline")
			t.Errorf("process %s is left: %q", filepath.Base(p), command)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		if strings.Contains(line, dir) || strings.Contains(line, "lab-settings") {
			t.Errorf("mount is left: %s", line)
		}
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range interfaces {
		if i.Name == "lab0" || i.Name == "cni0" {
			t.Errorf("interface %s is left", i.Name)
		}
	}
	if groups := cgroupsOf(t, c.Config()); len(groups) > 0 {
		t.Errorf("cgroups are left: %v", groups)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("folder %s is left (%v)", dir, err)
	}
	if now := readSettings(t); fmt.Sprint(now) != fmt.Sprint(settings) {
		t.Errorf("settings of the machine changed from %v to %v", settings, now)
	}
	if err := Down(context.Background(), dir, nil); err != nil {
		t.Errorf("a second down: %v", err)
	}
}
