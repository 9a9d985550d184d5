package suite

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestRoughEnds plays what goes wrong with pods and nodes without anybody
// killing a part. All must agree after each.
//
// Cases node-2, share-2, share-6, share-10.
func TestRoughEnds(t *testing.T) {
	table := newTable(t, "rough-ends.txt", "what else goes wrong")
	for _, r := range []struct {
		name string
		play func(context.Context) (string, error)
	}{
		{"deleted between bind and admission", deletedBeforeAdmission},
		{"deleted between bind and PreStart", deletedBeforePreStart},
		{"turned away at admission", turnedAway},
		{"force-deleted while it runs", forceDeleted},
		{"crash-looping, attempt upon attempt", crashLoop},
		{"completed, containers kept", completed},
		{"kubelet anew, plugin late", lateplugin},
		{"node rebooted", rebooted},
	} {
		table.run(t, r.name, "", func(ctx context.Context) (remark string, err error) {
			if err := serving(ctx); err != nil {
				return "", err
			}
			defer func() {
				// What was stopped must not stay so.
				err = errors.Join(err, signalComponent("kubelet", unix.SIGCONT), clearAll(ctx))
				if err == nil {
					err = found("after all were gone", settle(ctx))
				}
			}()
			if remark, err = r.play(ctx); err != nil {
				return remark, err
			}
			if err := servesNext(ctx); err != nil {
				return remark, err
			}
			return remark, found("", settle(ctx))
		})
	}
}

// clearAll removes every pod of the tests' namespace but the anchor.
func clearAll(ctx context.Context) error {
	var names []string
	err := await(ctx, "the pods to be listed", func(ctx context.Context) error {
		l, err := cluster.Client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		names = nil
		for _, p := range l.Items {
			if p.Name != "anchor" {
				names = append(names, p.Name)
			}
		}
		return nil
	})
	zero := int64(0)
	for _, name := range names {
		err = errors.Join(err, erase(ctx, name, &zero))
	}
	return errors.Join(err, vanish(ctx, names...))
}

// servesNext checks that the node gives a pod its share.
func servesNext(ctx context.Context) error {
	if _, err := post(ctx, idle("next", small())); err != nil {
		return err
	}
	if err := look(ctx, "next", "run", runs); err != nil {
		return fmt.Errorf("the next pod: %w", err)
	}
	return nil
}

func bound(p *corev1.Pod) error {
	if p.Spec.NodeName == "" {
		return errors.New("it isn't bound")
	}
	return nil
}

// large is a share of which a card has room for one.
func large() share { return share{"gpu": "2", "gpumem": "50000"} }

func deletedBeforeAdmission(ctx context.Context) (string, error) {
	if err := signalComponent("kubelet", unix.SIGSTOP); err != nil {
		return "", err
	}
	if _, err := post(ctx, idle("early", large())); err != nil {
		return "", err
	}
	if err := look(ctx, "early", "be bound", bound); err != nil {
		return "", err
	}
	zero := int64(0)
	if err := erase(ctx, "early", &zero); err != nil {
		return "", err
	}
	// Its share is free at once: the next one of that size is bound while the
	// kubelet is still away.
	if _, err := post(ctx, idle("heir", large())); err != nil {
		return "", err
	}
	if err := look(ctx, "heir", "be bound", bound); err != nil {
		return "", err
	}
	if err := signalComponent("kubelet", unix.SIGCONT); err != nil {
		return "", err
	}
	return "", look(ctx, "heir", "run", runs)
}

func deletedBeforePreStart(ctx context.Context) (string, error) {
	p := idle("early", large())
	absentImage(p)
	if _, err := post(ctx, p); err != nil {
		return "", err
	}
	if err := look(ctx, "early", "wait for its image", noImage); err != nil {
		return "", err
	}
	if err := vanish(ctx, "early"); err != nil {
		return "", err
	}
	if _, err := post(ctx, idle("heir", large())); err != nil {
		return "", err
	}
	return "", look(ctx, "heir", "run", runs)
}

// turnedAway lets the kubelet refuse a pod that was bound: the label that the
// pod wants is taken off the node in between.
func turnedAway(ctx context.Context) (string, error) {
	const label = "carve-e2e/here"
	mark := func(value string) error {
		body := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, label, value)
		_, err := cluster.Client.CoreV1().Nodes().Patch(ctx, cluster.Lab.Config().Node.Name, types.MergePatchType, body, metav1.PatchOptions{})
		return err
	}
	if err := mark(`"yes"`); err != nil {
		return "", err
	}
	p := idle("refused", large())
	p.Spec.NodeSelector = map[string]string{label: "yes"}
	// A kubelet that is stopped has not admitted it when the label goes.
	if err := signalComponent("kubelet", unix.SIGSTOP); err != nil {
		return "", err
	}
	if _, err := post(ctx, p); err != nil {
		return "", err
	}
	if err := look(ctx, "refused", "be bound", bound); err != nil {
		return "", err
	}
	if err := mark("null"); err != nil {
		return "", err
	}
	// A new kubelet has read the node before it admits a pod.
	if err := cluster.Lab.Kill(ctx, "kubelet"); err != nil {
		return "", err
	}
	if err := cluster.Lab.StartComponent(ctx, "kubelet"); err != nil {
		return "", err
	}
	reason := ""
	if err := look(ctx, "refused", "be turned away", func(p *corev1.Pod) error {
		if p.Status.Phase != corev1.PodFailed {
			return errors.New("it isn't")
		}
		reason = p.Status.Reason
		return nil
	}); err != nil {
		return "", err
	}
	if err := serving(ctx); err != nil {
		return reason, err
	}
	// It is still there, Failed, and holds nothing.
	if _, err := post(ctx, idle("heir", large())); err != nil {
		return reason, err
	}
	return reason, look(ctx, "heir", "run", runs)
}

// forceDeleted takes a running pod out of the API while its node can't end it.
// Until it is really gone, its share is nobody else's.
func forceDeleted(ctx context.Context) (string, error) {
	if _, err := post(ctx, script("ghost", large(), "exec gpuprobe serve 1GiB </dev/null >/dev/null")); err != nil {
		return "", err
	}
	if err := look(ctx, "ghost", "run", runs); err != nil {
		return "", err
	}
	if err := found("before", settle(ctx)); err != nil {
		return "", err
	}
	if err := signalComponent("kubelet", unix.SIGSTOP); err != nil {
		return "", err
	}
	zero := int64(0)
	if err := erase(ctx, "ghost", &zero); err != nil {
		return "", err
	}
	if _, err := post(ctx, idle("heir", large())); err != nil {
		return "", err
	}
	waits := func(p *corev1.Pod) error {
		if p.Spec.NodeName != "" {
			return final("it was bound to a share that a container still has")
		}
		if !strings.Contains(unscheduled(p), "ghost") {
			return errors.New("it isn't refused for the sake of the ghost yet")
		}
		return nil
	}
	if err := look(ctx, "heir", "wait", waits); err != nil {
		return "", err
	}
	if err := found("while it runs and is gone", settle(ctx)); err != nil {
		return "", err
	}
	if err := look(ctx, "heir", "wait still", waits); err != nil {
		return "", err
	}
	if err := signalComponent("kubelet", unix.SIGCONT); err != nil {
		return "", err
	}
	return "", look(ctx, "heir", "run", runs)
}

// crashLoop checks each attempt of a container that ends soon: the next one is
// created before the last one's removal is told.
func crashLoop(ctx context.Context) (string, error) {
	p := script("loop", small(), `[ -e /usr/lib/carve/limits ] && gpuprobe alloc 1GiB >/dev/null && gpuprobe alloc 4GiB >/dev/null; [ $? = 1 ] && exit 7; exit 8`)
	p.Spec.RestartPolicy = corev1.RestartPolicyAlways
	if _, err := post(ctx, p); err != nil {
		return "", err
	}
	attempts := 5
	if long() {
		attempts = 20
	}
	seen := map[string]bool{}
	return fmt.Sprintf("%d attempts", attempts), look(ctx, "loop", "crash again and again", func(p *corev1.Pod) error {
		if p.Status.Phase == corev1.PodFailed {
			return final("it failed")
		}
		for _, c := range p.Status.ContainerStatuses {
			for _, e := range []*corev1.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated} {
				if e == nil {
					continue
				}
				// 7: it had its share, and not more.
				if e.ExitCode != 7 {
					return final("an attempt ended with %d: it had no share, or more than that: %s", e.ExitCode, e.Message)
				}
				seen[e.ContainerID] = true
			}
		}
		if len(seen) < attempts {
			return fmt.Errorf("%d attempts seen", len(seen))
		}
		return nil
	})
}

// completed checks that pods that are done hold nothing, whatever the runtime
// keeps of them.
func completed(ctx context.Context) (string, error) {
	for i := range 3 {
		name := fmt.Sprintf("done-%d", i)
		if _, err := post(ctx, script(name, large(), "gpuprobe alloc 1GiB")); err != nil {
			return "", err
		}
		if err := look(ctx, name, "succeed", func(p *corev1.Pod) error {
			if p.Status.Phase != corev1.PodSucceeded {
				return errors.New("it didn't")
			}
			return nil
		}); err != nil {
			return "", err
		}
	}
	if _, err := post(ctx, idle("heir", large())); err != nil {
		return "", err
	}
	return "", look(ctx, "heir", "run", runs)
}

// lateplugin restarts the kubelet while the agent doesn't answer, as where the
// plugin comes up late. Pods wait, or are turned away once with a reason.
func lateplugin(ctx context.Context) (string, error) {
	late := 5 * time.Second
	if long() {
		late = 35 * time.Second
	}
	if _, err := post(ctx, idle("before", small())); err != nil {
		return "", err
	}
	id := ""
	if err := look(ctx, "before", "run", func(p *corev1.Pod) error {
		if err := runs(p); err != nil {
			return err
		}
		id = p.Status.ContainerStatuses[0].ContainerID
		return nil
	}); err != nil {
		return "", err
	}
	goOn, err := halt(ctx, "carve-node", "node")
	if err != nil {
		return "", err
	}
	if err := errors.Join(cluster.Lab.Kill(ctx, "kubelet"), cluster.Lab.StartComponent(ctx, "kubelet")); err != nil {
		return "", errors.Join(err, goOn(ctx))
	}
	waiting := idle("waiting", small())
	if _, err := post(ctx, waiting); err != nil {
		return "", errors.Join(err, goOn(ctx))
	}
	select {
	case <-ctx.Done():
	case <-time.After(late):
	}
	if err := goOn(ctx); err != nil {
		return "", err
	}
	away, err := end(ctx, "waiting", scene0(waiting), true)
	remark := fmt.Sprintf("%s late", late)
	if away > 0 {
		remark += fmt.Sprintf(", turned away %d×", away)
	}
	if away > 1 {
		err = errors.Join(err, fmt.Errorf("a pod was turned away %d times", away))
	}
	if err != nil {
		return remark, err
	}
	return remark, look(ctx, "before", "run on", func(p *corev1.Pod) error {
		if err := runs(p); err != nil {
			return err
		}
		if s := p.Status.ContainerStatuses[0]; s.ContainerID != id {
			return final("its container was replaced")
		}
		return nil
	})
}

// rebootNode ends all processes of the node but the control plane's, and clears
// what a boot clears: mounts and /run.
const rebootNode = `
for p in /proc/[0-9]*; do
  n=${p#/proc/}
  [ $n = 1 ] || [ $n = $$ ] || [ $n = $PPID ] && continue
  case "$(tr '\000' ' ' <$p/cmdline 2>/dev/null)" in
    ""|etcd\ *|*/etcd\ *|*kube-apiserver\ *|*kube-controller-manager\ *|*kube-scheduler\ *|*kube-proxy\ *) continue;;
  esac
  kill -9 $n 2>/dev/null
done
for i in 1 2 3; do
  awk '{print $5}' /proc/self/mountinfo | grep -E '^(/run/|/var/lib/kubelet/|/var/lib/containerd/)' | sort -r | while read -r m; do umount -l "$m" 2>/dev/null; done
done
find /run -mindepth 1 -delete 2>/dev/null
ls /run | wc -l
`

// rebooted takes the node's power away. Pods that may be restarted are, in
// their own shares.
func rebooted(ctx context.Context) (string, error) {
	// A pod without a slot, which no kubelet without a plugin turns away. The
	// webhook would give it one.
	keep := idle("keep", share{"gpumem": "5000"})
	keep.Spec.RestartPolicy = corev1.RestartPolicyAlways
	show, err := hideWebhook(ctx)
	if err == nil {
		_, err = post(ctx, keep)
	}
	if err := errors.Join(err, show()); err != nil {
		return "", err
	}
	one := int32(1)
	template := idle("", small())
	template.Spec.RestartPolicy = corev1.RestartPolicyAlways
	labels := map[string]string{"app": "owned"}
	set := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "owned", Namespace: ns},
		Spec: appsv1.ReplicaSetSpec{Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: template.Spec}},
	}
	sets := cluster.Client.AppsV1().ReplicaSets(ns)
	if _, err := sets.Create(ctx, set, metav1.CreateOptions{}); err != nil {
		return "", err
	}
	defer func() { _ = sets.Delete(ctx, "owned", metav1.DeleteOptions{}) }()
	owned := func() (failed int, err error) {
		err = await(ctx, "the owned pod to run", func(ctx context.Context) error {
			l, err := cluster.Client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=owned"})
			if err != nil {
				return err
			}
			ready := 0
			failed = 0
			for i := range l.Items {
				switch p := &l.Items[i]; {
				case p.Status.Phase == corev1.PodFailed:
					failed++
				case podReady(p) && runs(p) == nil:
					ready++
				default:
					return fmt.Errorf("%s: %s; %s", p.Name, p.Status.Phase, unscheduled(p))
				}
			}
			if ready != 1 {
				return fmt.Errorf("%d run", ready)
			}
			return nil
		})
		return failed, err
	}
	if _, err := owned(); err != nil {
		return "", err
	}
	var uid types.UID
	if err := look(ctx, "keep", "run", func(p *corev1.Pod) error { uid = p.UID; return runs(p) }); err != nil {
		return "", err
	}
	out, err := cluster.Lab.Output(ctx, "bash", "-c", rebootNode)
	if err != nil {
		return "", err
	}
	if left := strings.TrimSpace(string(out)); left != "0" {
		return "", fmt.Errorf("%s entries are left in /run", left)
	}
	for _, name := range []string{"containerd", "kubelet"} {
		if err := cluster.Lab.StartComponent(ctx, name); err != nil {
			return "", err
		}
	}
	if err := look(ctx, "keep", "run again", func(p *corev1.Pod) error {
		if p.UID != uid {
			return final("it is another pod")
		}
		if err := runs(p); err != nil {
			return err
		}
		if len(p.Status.ContainerStatuses) == 0 || p.Status.ContainerStatuses[0].RestartCount == 0 {
			return errors.New("its container isn't a new one yet")
		}
		return nil
	}); err != nil {
		return "", err
	}
	if err := serving(ctx); err != nil {
		return "", err
	}
	failed, err := owned()
	remark := ""
	if failed > 0 {
		remark = fmt.Sprintf("turned away %d×", failed)
	}
	if failed > 1 {
		err = errors.Join(err, fmt.Errorf("%d pods were turned away, want one at most", failed))
	}
	if err == nil {
		err = found("after the boot", settle(ctx))
	}
	// Before its pods are removed, so that none is made in their place.
	return remark, errors.Join(err, sets.Delete(ctx, "owned", metav1.DeleteOptions{}))
}
