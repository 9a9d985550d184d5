package suite

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/carve-gpu/carve/api"
)

// part is a program that can be killed.
type part struct {
	name string
	// kill ends it with SIGKILL. back starts it again, or waits until whoever
	// looks after it has, and until it answers.
	kill, back func(context.Context) error
	// rejects says that while it is away the kubelet may turn a pod away for
	// good: the device plugin's protocol leaves it no other answer.
	rejects bool
}

// parts are all that take part in handing out a share.
func parts() []part {
	return []part{
		podPart("agent", "carve-node", "node", true),
		podPart("extender", "carve-extender", "extender", false),
		component("scheduler", false),
		component("kubelet", true),
		component("containerd", false),
		component("apiserver", false),
	}
}

func partByName(name string) part {
	for _, p := range parts() {
		if p.name == name {
			return p
		}
	}
	panic("no part " + name)
}

// component is a part that the lab looks after.
func component(name string, rejects bool) part {
	return part{name: name, rejects: rejects,
		kill: func(ctx context.Context) error { return cluster.Lab.Kill(ctx, name) },
		back: func(ctx context.Context) error { return cluster.Lab.StartComponent(ctx, name) },
	}
}

// podPart is a part that the kubelet looks after.
func podPart(name, app, container string, rejects bool) part {
	killed := ""
	return part{name: name, rejects: rejects,
		kill: func(ctx context.Context) error {
			c, err := running1(ctx, app, container)
			if err != nil {
				return fmt.Errorf("kill %s: %w", name, err)
			}
			killed = c.Id
			return signalContainer(ctx, c.Id, unix.SIGKILL)
		},
		back: func(ctx context.Context) error {
			return await(ctx, name+" to be back", func(ctx context.Context) error {
				c, err := running1(ctx, app, container)
				if err != nil {
					return err
				}
				if c.Id == killed {
					return errors.New("its container is the old one")
				}
				return answers(ctx, name)
			})
		},
	}
}

// running1 is the running container of carve's own pods.
func running1(ctx context.Context, app, container string) (*cri.Container, error) {
	all, err := unfinished(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if c.Labels["io.kubernetes.pod.namespace"] == api.Namespace && strings.HasPrefix(c.Labels[labelPod], app) &&
			c.Labels[labelContainer] == container && c.State == cri.ContainerState_CONTAINER_RUNNING {
			return c, nil
		}
	}
	return nil, fmt.Errorf("no container of %s runs", app)
}

// signalContainer sends a signal to a container's first process.
func signalContainer(ctx context.Context, id string, signal unix.Signal) error {
	pid, err := firstProcess(ctx, id)
	if err != nil {
		return err
	}
	_, err = cluster.Lab.Output(ctx, "kill", fmt.Sprintf("-%d", signal), fmt.Sprint(pid))
	return err
}

// signalComponent sends a signal to a program of the lab; one that has ended
// gets none.
func signalComponent(name string, signal unix.Signal) error {
	s, err := cluster.Lab.Status()
	if err != nil {
		return err
	}
	for _, c := range s.Components {
		if c.Name == name {
			if err := unix.Kill(c.PID, signal); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("send %v to %s: %w", signal, name, err)
			}
			return nil
		}
	}
	return fmt.Errorf("no component %s", name)
}

// answers asks the agent or the extender whether it is ready.
func answers(ctx context.Context, name string) error {
	url := "http://" + cluster.Lab.Config().Node.IP() + ":9410/readyz"
	if name == "extender" {
		p, err := extenderPod(ctx)
		if err != nil {
			return err
		}
		url = "http://" + p.Status.PodIP + ":8080/readyz"
	}
	client := cluster.Lab.HTTPClient()
	client.Timeout = 2 * time.Second
	defer client.CloseIdleConnections()
	r, err := client.Get(url)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, r.Status)
	}
	return nil
}

// await waits until missing returns nil, for as long as patience lasts. Unlike
// eventually it leaves the verdict to the caller.
func await(ctx context.Context, what string, missing func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not within %s", patience))
	defer cancel()
	var last error
	for {
		err := missing(ctx)
		var final finalError
		switch {
		case err == nil:
			return nil
		case errors.As(err, &final):
			return fmt.Errorf("wait for %s: %w", what, err)
		case ctx.Err() == nil:
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %w", what, context.Cause(ctx), last)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// finalError ends a wait: what was waited for won't come.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

func final(format string, a ...any) error { return finalError{fmt.Errorf(format, a...)} }

// serving waits until the node takes pods: everybody answers, and the kubelet
// has said so to the cluster.
func serving(ctx context.Context) error {
	if err := cluster.WaitReady(ctx); err != nil {
		return err
	}
	return await(ctx, "agent and extender to be ready", func(ctx context.Context) error {
		if err := errors.Join(answers(ctx, "agent"), answers(ctx, "extender")); err != nil {
			return err
		}
		pods, err := cluster.AgentPods(ctx)
		if err != nil {
			return err
		}
		for _, p := range pods {
			if p.DeletionTimestamp == nil && podReady(&p) {
				return nil
			}
		}
		return errors.New("no pod of the agent is Ready")
	})
}

func podReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// post creates a pod; while the API server is away it tries again.
func post(ctx context.Context, p *corev1.Pod) (*corev1.Pod, error) {
	var out *corev1.Pod
	err := await(ctx, "pod "+p.Name+" to be created", func(ctx context.Context) (err error) {
		if out, err = cluster.Client.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{}); apierrors.IsAlreadyExists(err) {
			// An earlier try whose answer was lost.
			out, err = cluster.Client.CoreV1().Pods(ns).Get(ctx, p.Name, metav1.GetOptions{})
		}
		return err
	})
	return out, err
}

// look waits until a pod is as it should.
func look(ctx context.Context, name, what string, missing func(*corev1.Pod) error) error {
	return await(ctx, "pod "+name+" to "+what, func(ctx context.Context) error {
		p, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if err := missing(p); err != nil {
			return fmt.Errorf("%w; phase %s %s %s; %s", err, p.Status.Phase, p.Status.Reason, p.Status.Message, unscheduled(p))
		}
		return nil
	})
}

// runs says what a pod lacks to run.
func runs(p *corev1.Pod) error {
	if p.Status.Phase == corev1.PodFailed {
		return final("it failed")
	}
	n := 0
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Running != nil {
			n++
		} else if w := s.State.Waiting; w != nil && w.Message != "" {
			return fmt.Errorf("%s: %s: %s", s.Name, w.Reason, w.Message)
		}
	}
	if n < len(p.Spec.Containers) {
		return fmt.Errorf("%d of %d containers run", n, len(p.Spec.Containers))
	}
	return nil
}

// vanish deletes pods and waits until the API server and the runtime have
// forgotten them. It is no error when they are gone.
func vanish(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := erase(ctx, name, nil); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := await(ctx, "pod "+name+" to be gone", func(ctx context.Context) error {
			_, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
			if err == nil {
				return errors.New("it is there")
			}
			if !notFound(err) {
				return err
			}
			all, err := unfinished(ctx)
			if err != nil {
				return err
			}
			for _, c := range all {
				if c.Labels[labelPod] == name {
					return errors.New("a container of it runs")
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// erase asks for a pod's deletion; grace overrides the pod's own.
func erase(ctx context.Context, name string, grace *int64) error {
	return await(ctx, "pod "+name+" to be deleted", func(ctx context.Context) error {
		err := cluster.Client.CoreV1().Pods(ns).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: grace})
		if notFound(err) {
			return nil
		}
		return err
	})
}

// TestKilledPartsComeBack holds the killing itself: each part really ends and
// really is another process afterwards.
func TestKilledPartsComeBack(t *testing.T) {
	for _, p := range parts() {
		t.Run(p.name, func(t *testing.T) {
			identity := func() string {
				if p.name == "agent" || p.name == "extender" {
					app, name := "carve-node", "node"
					if p.name == "extender" {
						app, name = "carve-extender", "extender"
					}
					c, err := running1(t.Context(), app, name)
					if err != nil {
						t.Fatal(err)
					}
					return c.Id
				}
				s, err := cluster.Lab.Status()
				if err != nil {
					t.Fatal(err)
				}
				for _, c := range s.Components {
					if c.Name == p.name {
						return fmt.Sprint(c.PID)
					}
				}
				return ""
			}
			before := identity()
			begin := time.Now()
			if err := p.kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.back(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Logf("back after %s", time.Since(begin).Round(10*time.Millisecond))
			if err := serving(t.Context()); err != nil {
				t.Fatal(err)
			}
			if after := identity(); after == before || after == "" {
				t.Errorf("it was %s and is %s", before, after)
			}
		})
	}
}
