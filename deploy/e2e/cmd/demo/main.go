// Command demo shows carve at work on this machine: a real control plane and
// node in namespaces of their own, four software cards, carve installed, and
// pods on shares.
//
//	demo up     start it (an earlier one is ended first) and leave it running
//	demo down   end it and leave nothing
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var repo, name string
	root := &cobra.Command{Use: "demo", Short: "carve on a real Kubernetes node with software cards", SilenceUsage: true, SilenceErrors: true}
	root.PersistentFlags().StringVar(&repo, "repo", ".", "root of the repository, built")
	root.PersistentFlags().StringVar(&name, "name", "demo", "name of the lab")
	root.AddCommand(
		&cobra.Command{Use: "up", Short: "Start the demo and leave it running", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return up(cmd.Context(), repo, name) }},
		&cobra.Command{Use: "down", Short: "End the demo and leave nothing of it", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return down(cmd.Context(), name) }},
	)
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func down(ctx context.Context, name string) error {
	dir, err := lab.DefaultDir(name)
	if err != nil {
		return err
	}
	return install.Down(ctx, dir, lab.NewProgress(os.Stderr))
}

func up(ctx context.Context, repo, name string) error {
	begin := time.Now()
	repo, err := filepath.Abs(repo)
	if err != nil {
		return err
	}
	progress := lab.NewProgress(os.Stderr)
	programs, err := lab.Build(ctx, filepath.Join(repo, "deploy/e2e"), progress)
	if err != nil {
		return err
	}
	dir, err := lab.DefaultDir(name)
	if err != nil {
		return err
	}
	if _, err := lab.Open(dir, nil); err == nil {
		progress.Note("a demo is there: it is ended and started anew")
	} else if !errors.Is(err, lab.ErrNoLab) {
		return err
	}
	if err := install.Down(ctx, dir, nil); err != nil {
		return err
	}
	c, err := install.Up(ctx, install.Options{
		Repo: repo, Programs: programs, Name: name, Dir: dir,
		Cards: []string{"a100-80", "a100-80", "a100-80", "a100-80"},
	}, progress)
	if err != nil {
		return fmt.Errorf("%w\n(what is there stays for a look: bin/lab --name %s kubectl get pods -A; make demo-down ends it)", err, name)
	}
	d := demo{c, name}
	if err := d.show(ctx); err != nil {
		return err
	}
	fmt.Printf("\nUp after %.0f s. It stays until `make demo-down`. Look around:\n", time.Since(begin).Seconds())
	fmt.Printf(`  bin/lab --name %[1]s exec -- bin/carve cards
  bin/lab --name %[1]s exec -- bin/carve top pods
  bin/lab --name %[1]s exec -- bin/carve explain pod infer-a
  bin/lab --name %[1]s exec -- bin/carve cordon %[2]s 3 --reason "looks hot"
  bin/lab --name %[1]s kubectl get pods,gpunodes
  bin/lab --name %[1]s kubectl exec infer-a -- nvidia-smi
  bin/lab --name %[1]s kubectl apply -f - < deploy/examples/whole.yaml
The node's live page, at http://127.0.0.1:9410/ while this runs:
  bin/lab --name %[1]s forward --listen 127.0.0.1:9410 %[3]s:9410
`, name, c.Lab.Config().Node.Name, c.Lab.Config().Node.IP())
	return nil
}

type demo struct {
	*install.Cluster
	name string
}

// show runs the examples and prints what each got.
func (d demo) show(ctx context.Context) error {
	for _, example := range []string{"share.yaml", "share-bytes.yaml"} {
		b, err := os.ReadFile(filepath.Join(d.Repo, "deploy/examples", example))
		if err != nil {
			return err
		}
		if err := d.Lab.Apply(ctx, string(b)); err != nil {
			return err
		}
	}
	for _, pod := range []string{"infer-a", "infer-b"} {
		if err := d.running(ctx, pod); err != nil {
			return err
		}
	}
	if err := d.reported(ctx, 2); err != nil {
		return err
	}
	fmt.Println("\nTwo pods, one card. $ carve cards")
	if err := d.print(ctx, d.carve("cards")); err != nil {
		return err
	}
	fmt.Println("\nWhat infer-a sees of it. $ kubectl exec infer-a -- nvidia-smi")
	if err := d.print(ctx, d.exec("infer-a", "nvidia-smi")); err != nil {
		return err
	}
	fmt.Println("\nIt allocates within its 8000 MiB … $ kubectl exec infer-a -- gpuprobe alloc 2GiB")
	if err := d.print(ctx, d.exec("infer-a", "gpuprobe", "alloc", "2GiB")); err != nil {
		return err
	}
	fmt.Println("… and asks for more. $ kubectl exec infer-a -- gpuprobe alloc 9GiB")
	if err := d.print(ctx, d.exec("infer-a", "gpuprobe", "alloc", "9GiB")); err == nil {
		return errors.New("infer-a got more than its share")
	}
	return nil
}

func (d demo) carve(args ...string) []string {
	return append([]string{"env", "KUBECONFIG=/etc/kubernetes/admin.conf", install.Programs + "/carve"}, args...)
}

func (d demo) exec(pod string, args ...string) []string {
	return append([]string{"kubectl", "--kubeconfig=/etc/kubernetes/admin.conf", "exec", pod, "--"}, args...)
}

// print runs a command on the node and shows its output, indented.
func (d demo) print(ctx context.Context, command []string) error {
	cmd := d.Lab.Command(ctx, command[0], command[1:]...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	err := d.Lab.Run(cmd)
	for _, line := range strings.Split(strings.TrimRight(out.String(), "\n"), "\n") {
		fmt.Println("    " + line)
	}
	return err
}

func (d demo) running(ctx context.Context, pod string) error {
	return d.Wait(ctx, time.Minute, "pod "+pod+" to run", func(ctx context.Context) (string, error) {
		p, err := d.Client.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if p.Status.Phase == corev1.PodRunning {
			return "", nil
		}
		for _, c := range p.Status.Conditions {
			if c.Status == corev1.ConditionFalse && c.Message != "" {
				return c.Message, nil
			}
		}
		return "its phase is " + string(p.Status.Phase), nil
	})
}

// reported waits until the node reports so many slices.
func (d demo) reported(ctx context.Context, slices int32) error {
	return d.Wait(ctx, time.Minute, "the node to report the slices", func(ctx context.Context) (string, error) {
		n, err := d.Nodes.Get(ctx, d.Lab.Config().Node.Name)
		if err != nil {
			return "", err
		}
		active := int32(0)
		for _, c := range n.Status.Cards {
			for _, s := range c.Slices {
				if s.State == "active" {
					active++
				}
			}
		}
		if active < slices {
			return fmt.Sprintf("%d of %d are active", active, slices), nil
		}
		return "", nil
	})
}
