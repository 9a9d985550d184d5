// Package install puts carve on a lab the way a person would put it on a
// cluster: images, `kubectl apply -k deploy/manifests`, a label on the node and
// the extender's entry in kube-scheduler's configuration. The demo and the
// end-to-end tests both start here, so that what is tested is what is shown.
package install

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/deploy/e2e/image"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

// Paths inside the lab.
const (
	// DriverRoot is where the software GPU's driver root lies on the node.
	DriverRoot = "/var/lib/softgpu"
	// Programs is where the node shows this repository's bin folder.
	Programs = "/opt/carve"
	// deploy is where the node shows this repository's deploy folder.
	deploy = "/opt/carve-deploy"
	// credentials is where kube-scheduler finds its certificate.
	credentials = "/etc/kubernetes/carve"
)

// Options say what to bring up.
type Options struct {
	// Repo is the root of this repository, with `make build` done.
	Repo string
	// Programs is the folder that lab.Build returned.
	Programs string
	// Name and Dir are the lab's; see lab.Config.
	Name, Dir string
	// Cards are the models of the node's software cards, such as a100-80.
	Cards []string
	// Audit is the lab's; see lab.Config.
	Audit string
}

// Cluster is a lab with carve on it.
type Cluster struct {
	Lab    *lab.Lab
	Client kubernetes.Interface
	Nodes  *gpunodes.Client
	// Repo is the root of this repository.
	Repo string
}

// Up starts a lab with software cards and installs carve.
func Up(ctx context.Context, o Options, progress *lab.Progress) (*Cluster, error) {
	if err := built(o.Repo); err != nil {
		return nil, err
	}
	if o.Dir == "" {
		dir, err := lab.DefaultDir(o.Name)
		if err != nil {
			return nil, err
		}
		o.Dir = dir
	}
	root := SoftRoot(o.Dir)
	if err := initCards(ctx, o.Repo, root, o.Cards); err != nil {
		return nil, err
	}
	l, err := lab.Up(ctx, lab.Config{
		Name: o.Name, Dir: o.Dir, Programs: o.Programs, Audit: o.Audit,
		Binds: []lab.Bind{
			{Source: root, Target: DriverRoot},
			{Source: filepath.Join(o.Repo, "bin"), Target: Programs},
			{Source: filepath.Join(o.Repo, "deploy"), Target: deploy},
		},
	}, progress)
	if err != nil {
		return nil, err
	}
	c, err := Attach(o.Repo, l)
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := c.Install(ctx); err != nil {
		return c, fmt.Errorf("install carve: %w", err)
	}
	progress.Note("  ✓ %-34s %6.1f s", "carve installed", time.Since(begin).Seconds())
	return c, nil
}

// Attach makes a Cluster of a running lab.
func Attach(repo string, l *lab.Lab) (*Cluster, error) {
	config, err := l.RESTConfig()
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = 200, 400
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	nodes, err := gpunodes.New(config)
	if err != nil {
		return nil, err
	}
	return &Cluster{Lab: l, Client: client, Nodes: nodes, Repo: repo}, nil
}

// Down ends the lab in dir and removes its software cards.
func Down(ctx context.Context, dir string, progress *lab.Progress) error {
	if err := lab.Down(ctx, dir, progress); err != nil {
		return err
	}
	if err := os.RemoveAll(SoftRoot(dir)); err != nil {
		return fmt.Errorf("remove the software cards: %w", err)
	}
	return nil
}

// SoftRoot is the driver root of the lab's software cards on this machine. It
// lies beside the lab's folder, which the lab removes.
func SoftRoot(dir string) string { return strings.TrimRight(dir, "/") + "-softgpu" }

// built checks that what gets installed was made.
func built(repo string) error {
	var missing []string
	for _, f := range []string{"bin/carve", "bin/carve-hook", "vgpu/soft/build/softgpu", "vgpu/soft/build/gpuprobe", "vgpu/lib/build/libcarve-cuda.so", "vgpu/lib/build/libcarve-nvml.so"} {
		if _, err := os.Stat(filepath.Join(repo, f)); err != nil {
			missing = append(missing, f)
		}
	}
	if missing != nil {
		return fmt.Errorf("not built: %s (run make build)", strings.Join(missing, ", "))
	}
	return nil
}

func initCards(ctx context.Context, repo, root string, cards []string) error {
	if err := os.RemoveAll(root); err != nil {
		return fmt.Errorf("make software cards: %w", err)
	}
	args := []string{"init", root}
	for _, c := range cards {
		args = append(args, "--card", c)
	}
	out, err := exec.CommandContext(ctx, filepath.Join(repo, "vgpu/soft/build/softgpu"), args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("make software cards: softgpu %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// Install does what the README's install section says, step by step.
func (c *Cluster) Install(ctx context.Context) error {
	if err := c.importImages(ctx); err != nil {
		return err
	}
	manifests, err := c.kustomize(ctx, "deploy/manifests")
	if err != nil {
		return err
	}
	// The node's settings first, so that the agent starts with them.
	settings := fmt.Sprintf(`apiVersion: v1
kind: Namespace
metadata: {name: %[1]s}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: carve-node, namespace: %[1]s}
data: {CARVE_NODE_DRIVER_ROOT: %[2]s, CARVE_NODE_SOFTWARE_GPU: "true"}
`, api.Namespace, DriverRoot)
	for _, m := range []string{settings, manifests} {
		if err := c.Lab.Apply(ctx, m); err != nil {
			return err
		}
	}
	node := c.Lab.Config().Node.Name
	label := fmt.Sprintf(`{"metadata":{"labels":{%q:"true"}}}`, api.LabelManaged)
	if _, err := c.Client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(label), metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("label node %s: %w", node, err)
	}
	if err := c.wireScheduler(ctx); err != nil {
		return err
	}
	return c.WaitReady(ctx)
}

func (c *Cluster) importImages(ctx context.Context) error {
	base, err := lab.BaseLayer(ctx)
	if err != nil {
		return err
	}
	bin := func(f string) string { return filepath.Join(c.Repo, f) }
	carve, err := image.Carve(base, image.CarveFiles{
		Carve: bin("bin/carve"), Hook: bin("bin/carve-hook"),
		CUDA: bin("vgpu/lib/build/libcarve-cuda.so"), NVML: bin("vgpu/lib/build/libcarve-nvml.so"),
	})
	if err != nil {
		return err
	}
	probe, err := image.Program("localhost/gpuprobe:dev", base, bin("vgpu/soft/build/gpuprobe"))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "carve-images-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for name, m := range map[string]image.Image{"carve": carve, "gpuprobe": probe} {
		tar := filepath.Join(dir, name+".tar")
		if err := m.WriteFile(tar); err != nil {
			return err
		}
		if err := c.Lab.ImportImage(ctx, tar); err != nil {
			return err
		}
	}
	return nil
}

// kustomize renders a folder of this repository.
func (c *Cluster) kustomize(ctx context.Context, folder string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(c.Lab.Config().Programs, "kubectl"), "kustomize", filepath.Join(c.Repo, folder))
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return "", fmt.Errorf("render %s: %w", folder, err)
	}
	return string(out), nil
}

// wireScheduler gives kube-scheduler its certificate and its entry.
func (c *Cluster) wireScheduler(ctx context.Context) error {
	if err := c.Wait(ctx, 2*time.Minute, "the extender to be ready", func(ctx context.Context) (string, error) {
		d, err := c.Client.AppsV1().Deployments(api.Namespace).Get(ctx, "carve-extender", metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if d.Status.ReadyReplicas < 1 {
			return "no replica is ready", nil
		}
		return "", nil
	}); err != nil {
		return err
	}
	service, err := c.Client.CoreV1().Services(api.Namespace).Get(ctx, "carve-extender", metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("find the extender: %w", err)
	}
	if _, err := c.Carve(ctx, "extender", "credentials", "--out", credentials); err != nil {
		return err
	}
	config, err := c.Carve(ctx, "extender", "scheduler-config", "--base", deploy+"/scheduler/kube-scheduler.yaml",
		"--url", "https://"+service.Spec.ClusterIP+":443", "--tls-dir", credentials)
	if err != nil {
		return err
	}
	return c.Lab.UseScheduler(ctx, config)
}

// Carve runs the carve binary on the node as an administrator.
func (c *Cluster) Carve(ctx context.Context, args ...string) ([]byte, error) {
	return c.Lab.Output(ctx, "env", append([]string{"KUBECONFIG=/etc/kubernetes/admin.conf", Programs + "/carve"}, args...)...)
}

// AgentPods lists the pods of the node agent.
func (c *Cluster) AgentPods(ctx context.Context) ([]corev1.Pod, error) {
	l, err := c.Client.CoreV1().Pods(api.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=carve-node"})
	if err != nil {
		return nil, fmt.Errorf("list the agent's pods: %w", err)
	}
	return l.Items, nil
}

// WaitReady waits until the node offers its cards.
func (c *Cluster) WaitReady(ctx context.Context) error {
	name := c.Lab.Config().Node.Name
	return c.Wait(ctx, 2*time.Minute, "node "+name+" to offer its cards", func(ctx context.Context) (string, error) {
		report, err := c.Nodes.Get(ctx, name)
		if err != nil {
			return "", err
		}
		if len(report.Status.Cards) == 0 || report.Status.HookConnectedSince == nil {
			return fmt.Sprintf("it reports %d cards, hook connected: %v", len(report.Status.Cards), report.Status.HookConnectedSince != nil), nil
		}
		node, err := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if slots := node.Status.Allocatable[api.ResourceGPU]; slots.IsZero() {
			return "the kubelet has no " + api.ResourceGPU, nil
		}
		return "", nil
	})
}

// Wait asks until the answer is empty; an error counts as "not yet".
func (c *Cluster) Wait(ctx context.Context, limit time.Duration, what string, missing func(context.Context) (string, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	last := ""
	for {
		m, err := missing(ctx)
		switch {
		case err != nil:
			m = err.Error()
		case m == "":
			return nil
		}
		if ctx.Err() == nil {
			last = m
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %s; not within %s (logs: kubectl -n %s logs)", what, last, limit, api.Namespace)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
