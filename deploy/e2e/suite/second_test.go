package suite

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/image"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

// TestSecondInstall applies deploy/scheduler/second: a kube-scheduler of carve's own
// in a pod, and the webhook that sends it the pods that ask for cards, and no others.
func TestSecondInstall(t *testing.T) {
	const name = "carve-scheduler"
	base, err := lab.BaseLayer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	programs := cluster.Lab.Config().Programs
	scheduler, err := image.Program("localhost/kube-scheduler:dev", base, filepath.Join(programs, "kube-scheduler"))
	if err != nil {
		t.Fatal(err)
	}
	tar := filepath.Join(t.TempDir(), "kube-scheduler.tar")
	if err := scheduler.WriteFile(tar); err != nil {
		t.Fatal(err)
	}
	if err := cluster.Lab.ImportImage(t.Context(), tar); err != nil {
		t.Fatal(err)
	}
	render := func(folder string) string {
		t.Helper()
		out, err := exec.Command(filepath.Join(programs, "kubectl"), "kustomize", filepath.Join(cluster.Repo, folder)).Output()
		if err != nil {
			t.Fatalf("render %s: %v", folder, err)
		}
		return string(out)
	}
	service, err := cluster.Client.CoreV1().Services(api.Namespace).Get(t.Context(), "carve-extender", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// The lab has no DNS.
	manifests := strings.ReplaceAll(render("deploy/scheduler/second"), "https://carve-extender.carve-system.svc:443", "https://"+service.Spec.ClusterIP+":443")
	usual := render("deploy/manifests")
	rolledOut := func(deployment string) {
		t.Helper()
		eventually(t, deployment+" to be rolled out", func(ctx context.Context) string {
			d, err := cluster.Client.AppsV1().Deployments(api.Namespace).Get(ctx, deployment, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if d.Status.ObservedGeneration < d.Generation || d.Status.UpdatedReplicas != 1 || d.Status.ReadyReplicas != 1 || d.Status.Replicas != 1 {
				return "not yet"
			}
			// One that is ending may answer the webhook still, with what it was told before.
			l, err := cluster.Client.CoreV1().Pods(api.Namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(d.Spec.Selector)})
			if err != nil {
				return err.Error()
			}
			if len(l.Items) != 1 {
				return fmt.Sprintf("%d pods of it are there", len(l.Items))
			}
			return ""
		})
	}
	t.Cleanup(func() {
		ctx := context.Background()
		if t.Failed() {
			out, err := cluster.Lab.Kubectl(ctx, "-n", api.Namespace, "logs", "deployment/"+name, "--tail=30")
			t.Logf("its log: %s (%v)", out, err)
		}
		if _, err := cluster.Lab.Kubectl(ctx, "-n", api.Namespace, "delete", "deployment", name); err != nil {
			t.Error(err)
		}
		if err := cluster.Lab.Apply(ctx, usual); err != nil {
			t.Error(err)
		}
		rolledOut("carve-extender")
		if err := cluster.WaitReady(ctx); err != nil {
			t.Error(err)
		}
	})
	if err := cluster.Lab.Apply(t.Context(), manifests); err != nil {
		t.Fatal(err)
	}
	rolledOut("carve-extender")
	rolledOut(name)
	eventually(t, "the webhook to name the scheduler", func(ctx context.Context) string {
		p, err := dryRun(ctx, cluster.Client, pod("asked", container("app", share{"gpumem": "1000"})))
		if err != nil {
			return err.Error()
		}
		if p.Spec.SchedulerName != name {
			return "it is " + p.Spec.SchedulerName
		}
		return ""
	})
	create(t, pod("by-ours", container("app", share{"gpumem": "4000"})))
	create(t, pod("by-theirs", container("app", nil)))
	p := running(t, "by-ours")
	if g := grant(t, p); p.Spec.SchedulerName != name || g.Containers["app"][0].MemMiB != 4000 {
		t.Errorf("scheduled by %s, granted %+v", p.Spec.SchedulerName, g)
	}
	wantShare(t, "by-ours", "app", 4000)
	if p := running(t, "by-theirs"); p.Spec.SchedulerName != corev1.DefaultSchedulerName {
		t.Errorf("a pod that asks for nothing is scheduled by %s", p.Spec.SchedulerName)
	}
}

// TestPrivilegedShareWhereAllowed: the namespace's label is honoured by the policy and
// by the node.
func TestPrivilegedShareWhereAllowed(t *testing.T) {
	const name = "privileged-runs"
	inNamespace(t, name, api.LabelAllowPrivileged)
	yes := true
	p := pod("root", container("app", share{"gpumem": "1000"}))
	p.Namespace = name
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &yes}
	pods := cluster.Client.CoreV1().Pods(name)
	if _, err := pods.Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pods.Delete(context.Background(), "root", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "the privileged pod to run with its share", func(ctx context.Context) string {
		p, err := pods.Get(ctx, "root", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if p.Status.Phase != corev1.PodRunning {
			for _, s := range p.Status.ContainerStatuses {
				if w := s.State.Waiting; w != nil {
					return w.Reason + ": " + w.Message
				}
			}
			return string(p.Status.Phase) + " " + unscheduled(p)
		}
		return ""
	})
}
