package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/vgpu/region"
)

const (
	// live resizes that are counted, after some that aren't.
	resizes, resizeWarmup = 100, 5
	resizePod             = "bench-resize"
	resizePatience        = 30 * time.Second
)

// liveResize measures the time from the request on a running pod until the new
// limit stands in the file that the container has mapped: request, the
// extender's booking and write, the agent's watch, journal and file. It prints
// "resize_ms_p50 V ms" and "resize_ms_p99 V ms". Growing and shrinking take
// turns, each once the node has reported the one before.
func liveResize(ctx context.Context, c *install.Cluster) error {
	pods := c.Client.CoreV1().Pods(metav1.NamespaceDefault)
	zero, no := int64(0), false
	p, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: resizePod},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &zero, AutomountServiceAccountToken: &no,
			Containers: []corev1.Container{{Name: "app", Image: "localhost/gpuprobe:dev", ImagePullPolicy: corev1.PullNever, Command: []string{"/usr/bin/sleep", "1000000"},
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse("4000")}}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create pod %s: %w", resizePod, err)
	}
	if err := c.Wait(ctx, time.Minute, "pod "+resizePod+" to run", func(ctx context.Context) (string, error) {
		now, err := pods.Get(ctx, resizePod, metav1.GetOptions{})
		if err != nil || now.Status.Phase != corev1.PodRunning {
			return "it doesn't run yet", err
		}
		return "", nil
	}); err != nil {
		return err
	}
	// The very file that is mounted, seen from the node.
	limits := c.Lab.Path(filepath.Join("/run/carve/slices", string(p.UID), "app", "limits"))
	var took []time.Duration
	for i := range resizeWarmup + resizes {
		d, err := resizeOnce(ctx, c, string(p.UID), limits, fmt.Sprint("bench-", i), int64(5000+i%2*1000))
		if err != nil {
			return fmt.Errorf("live resize %d: %w", i, err)
		}
		if i >= resizeWarmup {
			took = append(took, d)
		}
	}
	slices.Sort(took)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	fmt.Fprintf(os.Stderr, "live resize, from the request to the limit in the container's file, %d times: median %s, most %s\n", resizes, took[len(took)/2].Round(100*time.Microsecond), took[len(took)-1].Round(100*time.Microsecond))
	fmt.Printf("resize_ms_p50 %.1f ms\nresize_ms_p99 %.1f ms\n", ms(took[len(took)/2]), ms(took[len(took)*99/100]))
	if err := pods.Delete(ctx, resizePod, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete pod %s: %w", resizePod, err)
	}
	return nil
}

// resizeOnce asks for an amount and waits for it in the file; then, off the
// clock, for the node's report.
func resizeOnce(ctx context.Context, c *install.Cluster, uid, limits, id string, mib int64) (time.Duration, error) {
	text, err := api.Resize{Version: api.ResizeVersion, ID: id, Containers: map[string]api.ResizeAmounts{"app": {MemMiB: &mib}}}.Encode()
	if err != nil {
		return 0, err
	}
	body := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, api.AnnotationResize, text)
	begin := time.Now()
	if _, err := c.Client.CoreV1().Pods(metav1.NamespaceDefault).Patch(ctx, resizePod, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		return 0, err
	}
	for {
		l, err := region.ReadLimits(limits)
		if err != nil {
			return 0, err
		}
		if l.Cards[0].LimitBytes == uint64(mib)<<20 {
			break
		}
		if time.Since(begin) > resizePatience {
			return 0, fmt.Errorf("after %s the limit is %d MiB, not %d", resizePatience, l.Cards[0].LimitBytes>>20, mib)
		}
		time.Sleep(100 * time.Microsecond)
	}
	took := time.Since(begin)
	return took, c.Wait(ctx, resizePatience, "the node to report the resize", func(ctx context.Context) (string, error) {
		n, err := c.Nodes.Get(ctx, c.Lab.Config().Node.Name)
		if err != nil {
			return "", err
		}
		for _, card := range n.Status.Cards {
			for _, s := range card.Slices {
				if s.PodUID == uid && s.MemMiB == mib {
					return "", nil
				}
			}
		}
		return "it reports another amount", nil
	})
}
