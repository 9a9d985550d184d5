// Command benchnode measures carve on a real node: what it adds to the time from
// a pod's creation until it runs, how fast the hook answers a hundred containers
// at once, and what carve writes to the API server, for each pod and while
// nothing happens. It prints "name value unit" lines and takes about three
// minutes.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

const (
	name = "bench"
	// pairs of pods that are counted, after some that aren't.
	pairs, warmup = 25, 3
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	progress := lab.NewProgress(os.Stderr)
	repo, err := filepath.Abs(".")
	if err != nil {
		return err
	}
	programs, err := lab.Build(ctx, filepath.Join(repo, "deploy/e2e"), progress)
	if err != nil {
		return err
	}
	dir, err := lab.DefaultDir(name)
	if err != nil {
		return err
	}
	if err := install.Down(ctx, dir, nil); err != nil {
		return err
	}
	defer func() {
		if down := install.Down(context.WithoutCancel(ctx), dir, progress); err == nil {
			err = down
		}
	}()
	c, err := install.Up(ctx, install.Options{Repo: repo, Programs: programs, Name: name, Dir: dir, Cards: []string{"a100-80", "a100-80"}, Audit: carves}, progress)
	if err != nil {
		return err
	}
	if err := starts(ctx, c); err != nil {
		return err
	}
	if err := hookUnderBurst(ctx, c); err != nil {
		return err
	}
	if err := liveResize(ctx, c); err != nil {
		return err
	}
	return idle(ctx, c)
}

// starts compares pods with and without a share, which take turns, and counts
// what carve writes for those with one. (For the others it writes nothing; that
// would show.)
func starts(ctx context.Context, c *install.Cluster) error {
	var with, without []time.Duration
	var before int64
	for i := range warmup + pairs {
		if i == warmup {
			if err := quiet(ctx, c); err != nil {
				return err
			}
			before = logged(c)
		}
		for _, shared := range []bool{false, true} {
			d, err := once(ctx, c, fmt.Sprintf("bench-%d-%t", i, shared), shared)
			if err != nil {
				return err
			}
			switch {
			case i < warmup:
			case shared:
				with = append(with, d)
			default:
				without = append(without, d)
			}
		}
	}
	w, wo := median(with), median(without)
	fmt.Fprintf(os.Stderr, "creation to running, median of %d: %s with a share, %s without\n", pairs, w, wo)
	fmt.Printf("pod_running_ratio %.3f ratio\n", w.Seconds()/wo.Seconds())
	if err := quiet(ctx, c); err != nil {
		return err
	}
	writes, err := since(c, before)
	if err != nil {
		return err
	}
	tell("one pod after another", writes)
	fmt.Printf("gpunode_writes_per_pod %.2f writes\n", float64(writes.of("gpunodes"))/pairs)
	fmt.Printf("api_writes_per_pod %.2f writes\n", float64(len(writes))/pairs)
	return nil
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// once creates a pod, waits until it runs, and removes it.
func once(ctx context.Context, c *install.Cluster, name string, shared bool) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	zero, no := int64(0), false
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &zero, AutomountServiceAccountToken: &no,
			Containers: []corev1.Container{{Name: "app", Image: "localhost/gpuprobe:dev", ImagePullPolicy: corev1.PullNever, Command: []string{"/usr/bin/sleep", "1000000"}}},
		},
	}
	if shared {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1"), "nvidia.com/gpumem": resource.MustParse("4000")}
	}
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)
	w, err := pods.Watch(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()})
	if err != nil {
		return 0, fmt.Errorf("watch pod %s: %w", name, err)
	}
	defer w.Stop()
	begin := time.Now()
	if _, err := pods.Create(ctx, p, metav1.CreateOptions{}); err != nil {
		return 0, fmt.Errorf("create pod %s: %w", name, err)
	}
	took, err := untilRunning(ctx, w, begin)
	if err != nil {
		return 0, fmt.Errorf("pod %s: %w", name, err)
	}
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return 0, fmt.Errorf("delete pod %s: %w", name, err)
	}
	return took, c.Wait(ctx, time.Minute, "pod "+name+" to be gone", func(ctx context.Context) (string, error) {
		l, err := pods.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		if err != nil {
			return "", err
		}
		if len(l.Items) > 0 {
			return "it is there", nil
		}
		return "", nil
	})
}

func untilRunning(ctx context.Context, w watch.Interface, begin time.Time) (time.Duration, error) {
	for {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case e, open := <-w.ResultChan():
			if !open {
				return 0, fmt.Errorf("the watch ended")
			}
			p, ok := e.Object.(*corev1.Pod)
			if ok && p.Status.Phase == corev1.PodRunning {
				return time.Since(begin), nil
			}
		}
	}
}
