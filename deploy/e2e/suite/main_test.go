// Package suite tests carve whole: the manifests of deploy/, a real kubelet,
// containerd, runc, kube-scheduler and API server, containers that call the
// driver API. Only the cards are software.
package suite

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

// cluster is the one lab that all tests of this package share: two A100 cards
// of 80 GiB on one node. Each test removes its pods.
var cluster *install.Cluster

// labName is the lab's name. CARVE_E2E_NAME sets another one, so that two runs
// can be on one machine.
var labName = cmp.Or(os.Getenv("CARVE_E2E_NAME"), "suite")

const (
	ns         = "default"
	probeImage = "localhost/gpuprobe:dev"
	// patience bounds every wait. Nothing is measured by it.
	patience = 2 * time.Minute
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the end-to-end tests need root: run them as root")
		return 1
	}
	ctx := context.Background()
	progress := lab.NewProgress(os.Stderr)
	repo, err := filepath.Abs("../../..")
	if err == nil {
		cluster, err = bringUp(ctx, repo, progress)
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, "bring up the cluster:", err)
		explain()
	} else if code = m.Run(); code != 0 {
		explain()
	}
	if os.Getenv("CARVE_E2E_KEEP") != "" {
		fmt.Fprintf(os.Stderr, "kept: bin/lab --name %[1]s exec -- sh; bin/lab --name %[1]s down\n", labName)
		return code
	}
	dir, err := lab.DefaultDir(labName)
	if err == nil {
		err = install.Down(ctx, dir, progress)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "take down the cluster:", err)
		return 1
	}
	return code
}

func bringUp(ctx context.Context, repo string, progress *lab.Progress) (*install.Cluster, error) {
	programs, err := lab.Build(ctx, filepath.Join(repo, "deploy/e2e"), progress)
	if err != nil {
		return nil, err
	}
	dir, err := lab.DefaultDir(labName)
	if err != nil {
		return nil, err
	}
	if err := install.Down(ctx, dir, nil); err != nil {
		return nil, err
	}
	return install.Up(ctx, install.Options{
		Repo: repo, Programs: programs, Name: labName, Dir: dir,
		Cards: []string{"a100-80", "a100-80"},
	}, progress)
}

// explain prints what a person would ask for after a failure.
func explain() {
	if cluster == nil {
		return
	}
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"get", "gpunodes", "-o", "yaml"},
		{"-n", api.Namespace, "logs", "-l", "app.kubernetes.io/name=carve-extender", "--tail=40"},
		{"-n", api.Namespace, "logs", "-l", "app.kubernetes.io/name=carve-node", "--tail=60"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		out, err := cluster.Lab.Kubectl(ctx, args...)
		cancel()
		if len(out) > 8000 {
			out = out[len(out)-8000:]
		}
		fmt.Fprintf(os.Stderr, "--- kubectl %s (%v)\n%s\n", strings.Join(args, " "), err, out)
	}
}

// share is a container's limits: amounts by short name ("gpu", "gpumem", …).
type share map[string]string

// container makes a container that idles and can be probed by exec.
func container(name string, s share) corev1.Container {
	c := corev1.Container{
		Name: name, Image: probeImage, ImagePullPolicy: corev1.PullNever,
		Command: []string{"/usr/bin/sleep", "1000000"},
	}
	for k, v := range s {
		if c.Resources.Limits == nil {
			c.Resources.Limits = corev1.ResourceList{}
		}
		c.Resources.Limits[corev1.ResourceName("nvidia.com/"+k)] = resource.MustParse(v)
	}
	return c
}

// pod makes a pod of containers.
func pod(name string, containers ...corev1.Container) *corev1.Pod {
	zero, no := int64(0), false
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: ns},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: &zero,
			AutomountServiceAccountToken:  &no,
			Containers:                    containers,
		},
	}
}

// create makes the pod and removes it at the test's end.
func create(t *testing.T, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	out, err := cluster.Client.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create pod %s: %v", p.Name, err)
	}
	t.Cleanup(func() { remove(t, p.Name) })
	return out
}

// remove deletes a pod and waits until it and its slices are gone.
func remove(t *testing.T, name string) {
	t.Helper()
	ctx := context.Background()
	p, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return
	}
	if err != nil {
		t.Errorf("get pod %s: %v", name, err)
		return
	}
	if err := cluster.Client.CoreV1().Pods(ns).Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Errorf("delete pod %s: %v", name, err)
		return
	}
	eventually(t, "pod "+name+" and its slices to be gone", func(ctx context.Context) string {
		if _, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Sprintf("the pod is there (%v)", err)
		}
		for _, c := range cards(ctx, t) {
			for _, s := range c.Slices {
				if s.PodUID == string(p.UID) {
					return "card " + c.UUID + " still reports its slice"
				}
			}
		}
		return ""
	})
}

// eventually waits until missing answers "".
func eventually(t *testing.T, what string, missing func(context.Context) string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	last := ""
	for {
		m := missing(ctx)
		if m == "" {
			return
		}
		if ctx.Err() == nil {
			last = m
		}
		select {
		case <-ctx.Done():
			t.Fatalf("waited %s for %s: %s", patience, what, last)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// get reads a pod.
func get(ctx context.Context, t *testing.T, name string) *corev1.Pod {
	t.Helper()
	p, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		t.Fatalf("get pod %s: %v", name, err)
	}
	return p
}

// running waits until all containers of the pod run.
func running(t *testing.T, name string) *corev1.Pod {
	t.Helper()
	var p *corev1.Pod
	eventually(t, "pod "+name+" to run", func(ctx context.Context) string {
		p = get(ctx, t, name)
		ready := 0
		for _, s := range p.Status.ContainerStatuses {
			if s.State.Running != nil {
				ready++
			} else if w := s.State.Waiting; w != nil && w.Message != "" {
				return s.Name + ": " + w.Reason + ": " + w.Message
			}
		}
		if p.Status.Phase == corev1.PodFailed {
			t.Fatalf("pod %s failed: %s %s", name, p.Status.Reason, p.Status.Message)
		}
		if ready < len(p.Spec.Containers) {
			return fmt.Sprintf("phase %s, %d of %d containers; %s", p.Status.Phase, ready, len(p.Spec.Containers), unscheduled(p))
		}
		return ""
	})
	return p
}

// unscheduled is the scheduler's message for a pod that waits.
func unscheduled(p *corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Message
		}
	}
	return ""
}

// grant is the pod's, decoded.
func grant(t *testing.T, p *corev1.Pod) api.Grant {
	t.Helper()
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	if err != nil {
		t.Fatalf("pod %s: %v", p.Name, err)
	}
	return g
}

// cards is the node's report.
func cards(ctx context.Context, t *testing.T) []v1alpha1.Card {
	t.Helper()
	n, err := cluster.Nodes.Get(ctx, cluster.Lab.Config().Node.Name)
	if err != nil {
		t.Fatalf("get the node's report: %v", err)
	}
	return n.Status.Cards
}

// result is what a command in a container gave.
type result struct {
	stdout, stderr string
	code           int
}

// shell runs a command in a container; its exit code is part of the result.
func shell(t *testing.T, pod, container string, command ...string) result {
	t.Helper()
	args := append([]string{"--kubeconfig=/etc/kubernetes/admin.conf", "exec", pod, "-c", container, "--"}, command...)
	cmd := cluster.Lab.Command(t.Context(), "kubectl", args...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := cluster.Lab.Run(cmd)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("exec in %s/%s: %v: %s", pod, container, err, stderr.String())
	}
	r := result{out.String(), stderr.String(), 0}
	if exit != nil {
		r.code = exit.ExitCode()
	}
	return r
}

// probe runs gpuprobe and decodes its JSON lines.
func probe(t *testing.T, pod, container string, args ...string) ([]map[string]any, result) {
	t.Helper()
	r := shell(t, pod, container, append([]string{"/usr/bin/gpuprobe"}, args...)...)
	var lines []map[string]any
	for _, l := range strings.Split(strings.TrimSpace(r.stdout), "\n") {
		if l == "" {
			continue
		}
		var m map[string]any
		if err := json.Unmarshal([]byte(l), &m); err != nil {
			t.Fatalf("gpuprobe %s in %s/%s: %q is not JSON: %v; stderr: %s", strings.Join(args, " "), pod, container, l, err, r.stderr)
		}
		lines = append(lines, m)
	}
	return lines, r
}
