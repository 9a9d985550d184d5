package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/install"
)

const (
	// burstPods pods of burstContainers containers each are created at once.
	burstPods, burstContainers = 25, 4
	burstLabel                 = "bench=burst"
	burstLimit                 = 5 * time.Minute
)

// hookUnderBurst creates a hundred containers at once and reads from the agent
// how fast its hook answered, and from the audit log what carve wrote.
func hookUnderBurst(ctx context.Context, c *install.Cluster) error {
	node := c.Lab.Config().Node.Name
	if _, err := c.Nodes.Patch(ctx, node, types.MergePatchType, []byte(`{"spec":{"slotsPerCard":64}}`)); err != nil {
		return fmt.Errorf("make slots for %d containers: %w", burstPods*burstContainers, err)
	}
	if err := c.Wait(ctx, burstLimit, "the slots", func(ctx context.Context) (string, error) {
		n, err := c.Client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return "", err
		}
		if q := n.Status.Allocatable[api.ResourceGPU]; q.Value() != 128 {
			return "the node offers " + q.String(), nil
		}
		return "", nil
	}); err != nil {
		return err
	}
	if err := quiet(ctx, c); err != nil {
		return err
	}
	before, err := answers(c)
	if err != nil {
		return err
	}
	offset, begin := logged(c), time.Now()
	if err := createBurst(ctx, c); err != nil {
		return err
	}
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)
	of := metav1.ListOptions{LabelSelector: burstLabel}
	if err := c.Wait(ctx, burstLimit, "the burst to run", func(ctx context.Context) (string, error) {
		l, err := pods.List(ctx, of)
		if err != nil {
			return "", err
		}
		running := 0
		for _, p := range l.Items {
			if p.Status.Phase == corev1.PodRunning {
				running++
			}
		}
		if running < burstPods {
			return fmt.Sprintf("%d of %d pods run", running, burstPods), nil
		}
		return "", nil
	}); err != nil {
		return err
	}
	took := time.Since(begin)
	after, err := answers(c)
	if err != nil {
		return err
	}
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{}, of); err != nil {
		return fmt.Errorf("delete the burst: %w", err)
	}
	if err := c.Wait(ctx, burstLimit, "the burst to be gone", func(ctx context.Context) (string, error) {
		l, err := pods.List(ctx, of)
		if err == nil && len(l.Items) > 0 {
			return fmt.Sprintf("%d pods are there", len(l.Items)), nil
		}
		return "", err
	}); err != nil {
		return err
	}
	if err := quiet(ctx, c); err != nil {
		return err
	}
	w, err := since(c, offset)
	if err != nil {
		return err
	}
	tell(fmt.Sprintf("%d pods at once", burstPods), w)
	n := after.minus(before)
	fmt.Fprintf(os.Stderr, "%d containers at once: all run after %s, the hook answered %.0f, p50 %.3f ms\n", burstPods*burstContainers, took.Round(100*time.Millisecond), n.count(), 1000*n.quantile(.5))
	fmt.Printf("hook_p99_ms %.3f ms\n", 1000*n.quantile(.99))
	fmt.Printf("burst_gpunode_writes_per_pod %.2f writes\n", float64(w.of("gpunodes"))/burstPods)
	return nil
}

func createBurst(ctx context.Context, c *install.Cluster) error {
	var all sync.WaitGroup
	faults := make([]error, burstPods)
	for i := range burstPods {
		all.Go(func() {
			zero, no := int64(0), false
			p := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("burst-%d", i), Labels: map[string]string{"bench": "burst"}},
				Spec:       corev1.PodSpec{TerminationGracePeriodSeconds: &zero, AutomountServiceAccountToken: &no},
			}
			for k := range burstContainers {
				p.Spec.Containers = append(p.Spec.Containers, corev1.Container{
					Name: fmt.Sprintf("c%d", k), Image: "localhost/gpuprobe:dev", ImagePullPolicy: corev1.PullNever, Command: []string{"/usr/bin/sleep", "1000000"},
					Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1"), "nvidia.com/gpumem": resource.MustParse("500")}},
				})
			}
			_, faults[i] = c.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, p, metav1.CreateOptions{})
		})
	}
	all.Wait()
	if err := errors.Join(faults...); err != nil {
		return fmt.Errorf("create the burst: %w", err)
	}
	return nil
}

// histogram counts answers by the upper bounds of their seconds, cumulated.
type histogram map[float64]float64

// answers reads how fast the agent's hook has answered, whatever the result.
func answers(c *install.Cluster) (histogram, error) {
	client := c.Lab.HTTPClient()
	client.Timeout = 10 * time.Second
	defer client.CloseIdleConnections()
	r, err := client.Get("http://" + c.Lab.Config().Node.IP() + ":9410/metrics")
	if err != nil {
		return nil, fmt.Errorf("scrape the agent: %w", err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, fmt.Errorf("scrape the agent: %w", err)
	}
	if r.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("scrape the agent: %s", r.Status)
	}
	h := histogram{}
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "carve_hook_create_seconds_bucket{") {
			continue
		}
		_, rest, _ := strings.Cut(line, `le="`)
		bound, value, ok := strings.Cut(strings.TrimSpace(rest), `"} `)
		le, err := strconv.ParseFloat(bound, 64) // "+Inf" as well
		if err != nil || !ok {
			return nil, fmt.Errorf("scrape the agent: %q", line)
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return nil, fmt.Errorf("scrape the agent: %q", line)
		}
		h[le] += n
	}
	return h, nil
}

func (h histogram) minus(before histogram) histogram {
	out := histogram{}
	for le, n := range h {
		out[le] = n - before[le]
	}
	return out
}

func (h histogram) count() float64 {
	most := 0.
	for _, n := range h {
		most = max(most, n)
	}
	return most
}

// quantile is the upper bound of the bucket that holds the quantile: never less
// than the true value.
func (h histogram) quantile(q float64) float64 {
	bounds := make([]float64, 0, len(h))
	for le := range h {
		bounds = append(bounds, le)
	}
	sort.Float64s(bounds)
	for _, le := range bounds {
		if h[le] >= q*h.count() {
			return le
		}
	}
	return 0
}
