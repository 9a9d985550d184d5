package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/deploy/e2e/image"
)

// Up starts a lab and returns once its node is Ready, Services work and the
// default service account exists. When it fails, no process is left, but the
// logs are: Down removes them, and so does the next Up.
func Up(ctx context.Context, config Config, progress *Progress) (*Lab, error) {
	c, err := config.complete()
	if err != nil {
		return nil, err
	}
	if err := checkPrograms(c.Programs); err != nil {
		return nil, fmt.Errorf("start lab %s: %w", c.Name, err)
	}
	unlock, err := lockDir(ctx, c.Dir, func() { progress.Note("waiting for another process that changes lab %s", c.Name) })
	if err != nil {
		return nil, fmt.Errorf("start lab %s: %w", c.Name, err)
	}
	defer unlock()
	l := &Lab{config: c, progress: progress}
	if err := l.clear(ctx); err != nil {
		return nil, fmt.Errorf("start lab %s in %s: %w", c.Name, c.Dir, err)
	}
	// Written before the first process starts, so that Down finds what there is.
	l.config = c
	l.state = state{Version: stateVersion, Config: c, Components: map[string]process{}, Started: time.Now()}
	if err := l.save(); err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := l.start(ctx); err != nil {
		if cleanup := l.endAll(context.WithoutCancel(ctx)); cleanup != nil {
			err = errors.Join(err, cleanup)
		}
		return nil, fmt.Errorf("start lab %s: %w", c.Name, err)
	}
	l.state.Ready = time.Now()
	if err := l.save(); err != nil {
		return nil, err
	}
	progress.Note("lab %s is up after %.1f s: %s", c.Name, time.Since(begin).Seconds(), c.Dir)
	return l, nil
}

// clear makes the lab's folder empty, if what is in there is a lab that has ended.
func (l *Lab) clear(ctx context.Context) error {
	err := l.load()
	if errors.Is(err, ErrNoLab) {
		if files, err := os.ReadDir(l.config.Dir); err != nil || len(files) > 0 {
			return errors.Join(errors.New("the folder is neither empty nor a lab's: choose another one"), err)
		}
		return nil
	}
	if err == nil && l.state.Holder.alive() {
		return errors.New("it is running; end it with `lab down`, or give the new one a --name")
	}
	if err := l.wipe(ctx); err != nil {
		return fmt.Errorf("remove what was left of the last one: %w", err)
	}
	return nil
}

func (l *Lab) start(ctx context.Context) error {
	err := l.progress.step("namespaces, mounts, network", nil, func() (err error) {
		// One after the other: the lab's mounts show these files.
		if err := l.config.writePKI(); err != nil {
			return err
		}
		if err := l.config.writeConfigs(); err != nil {
			return err
		}
		if l.state.Holder, err = startHolder(l.config); err != nil {
			return err
		}
		if err := l.save(); err != nil {
			return err
		}
		return l.setUp(ctx)
	})
	if err != nil {
		return err
	}

	// etcd and containerd depend on nothing; all else on the API server; the
	// kubelet on both.
	group, ctx := errgroup.WithContext(ctx)
	launched := newLaunches(l)
	apiReady, runtimeReady := make(chan struct{}), make(chan struct{})
	group.Go(func() error {
		err := l.progress.step("API server", nil, func() error {
			// The API server waits for etcd by itself.
			if err := launched.start("etcd"); err != nil {
				return err
			}
			return launched.run(ctx, "apiserver")
		})
		if err == nil {
			close(apiReady)
		}
		return err
	})
	group.Go(func() error {
		err := l.progress.step("containerd and its images", nil, func() error {
			if err := launched.run(ctx, "containerd"); err != nil {
				return err
			}
			return l.importBasics(ctx)
		})
		if err == nil {
			close(runtimeReady)
		}
		return err
	})
	for _, name := range []string{"kcm", "scheduler", "kube-proxy"} {
		group.Go(func() error {
			if !both(ctx, apiReady, nil) {
				return nil
			}
			return l.progress.step(name, nil, func() error { return launched.run(ctx, name) })
		})
	}
	group.Go(func() error {
		if !both(ctx, apiReady, runtimeReady) {
			return nil
		}
		return l.progress.step("node Ready", nil, func() error {
			if err := launched.run(ctx, "kubelet"); err != nil {
				return err
			}
			err := l.nodeReady(ctx)
			if err != nil && ctx.Err() == nil {
				return l.failure("kubelet", err)
			}
			return err
		})
	})
	err = group.Wait()
	l.state.Components = launched.processes()
	return err
}

// both waits for two events (nil has happened); false: ctx ended first.
func both(ctx context.Context, a, b <-chan struct{}) bool {
	for _, event := range []<-chan struct{}{a, b} {
		if event == nil {
			continue
		}
		select {
		case <-event:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// nodeReady waits until pods can be created and will run.
func (l *Lab) nodeReady(ctx context.Context) error {
	rest, err := l.RESTConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return err
	}
	ctx, cancel := within(ctx, 60*time.Second)
	defer cancel()
	missing := "no answer yet"
	for {
		if missing = notReady(ctx, client, l.config.Node.Name); missing == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", missing, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// notReady says what is missing; empty: nothing.
func notReady(ctx context.Context, client kubernetes.Interface, nodeName string) string {
	node, err := client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	ready := "node " + nodeName + " has no condition Ready"
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			ready = ""
			if condition.Status != corev1.ConditionTrue {
				ready = fmt.Sprintf("node %s is not Ready: %s", nodeName, condition.Message)
			}
		}
	}
	if ready != "" {
		return ready
	}
	// The controller manager takes the not-ready taint away a little later.
	for _, taint := range node.Spec.Taints {
		return fmt.Sprintf("node %s still has the taint %s", nodeName, taint.Key)
	}
	if _, err := client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{}); err != nil {
		return err.Error()
	}
	return ""
}

// importBasics imports the sandbox image and a base image with a shell.
func (l *Lab) importBasics(ctx context.Context) error {
	base, err := BaseLayer(ctx)
	if err != nil {
		return err
	}
	for name, m := range map[string]image.Image{"pause": image.Pause(l.config.program("pause")), "busybox": image.Base(base)} {
		path := l.config.path("images", name+".tar")
		if err := m.WriteFile(path); err != nil {
			return err
		}
		if err := l.ImportImage(ctx, path); err != nil {
			return err
		}
	}
	return nil
}

// BaseLayer is image.BaseLayer with this machine's static busybox.
func BaseLayer(ctx context.Context) (*image.Layer, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, fmt.Errorf("base image: busybox is missing (Debian package busybox-static): %w", err)
	}
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("base image: %s --list: %w", busybox, err)
	}
	return image.BaseLayer(busybox, strings.Fields(string(applets))), nil
}

// ImportImage gives an image tar, a file of the machine, to the node's containerd.
func (l *Lab) ImportImage(ctx context.Context, path string) error {
	tar, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("import image: %w", err)
	}
	defer tar.Close()
	// Through stdin: the path may be hidden in the lab.
	cmd := l.Command(ctx, "ctr", "--namespace", "k8s.io", "images", "import", "-")
	cmd.Stdin = tar
	if _, err := l.output(cmd); err != nil {
		return fmt.Errorf("import image %s: %w", path, err)
	}
	return nil
}

// Down ends the lab in dir: every process, mount and interface in it, its
// cgroups, and the folder. It is no error when there is none, and a lab that was
// started only in part is ended too.
func Down(ctx context.Context, dir string, progress *Progress) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	l := &Lab{config: Config{Dir: dir}, progress: progress}
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		// Even so something may be left, should the folder have been removed by hand.
		if err := l.endAll(ctx); err != nil {
			return fmt.Errorf("end lab %s: %w", dir, err)
		}
		progress.Note("no lab in %s", dir)
		return nil
	}
	unlock, err := lockDir(ctx, dir, func() { progress.Note("waiting for another process that changes the lab in %s", dir) })
	if err != nil {
		return fmt.Errorf("end lab %s: %w", dir, err)
	}
	defer unlock()
	err = l.load()
	if err != nil && !errors.Is(err, ErrNoLab) {
		return fmt.Errorf("end lab: %w", err)
	}
	found := err == nil
	return progress.step("lab in "+dir+" ended", nil, func() error {
		if !found {
			// The lab's files are not looked for: who knows whose they are.
			err = l.endAll(ctx)
		} else {
			err = l.wipe(ctx)
		}
		if err != nil {
			return fmt.Errorf("end lab %s: %w", dir, err)
		}
		if err := os.Remove(dir); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
			return fmt.Errorf("end lab: remove its folder: %w", err)
		}
		return nil
	})
}

// Down ends this lab; see the function Down.
func (l *Lab) Down(ctx context.Context) error { return Down(ctx, l.config.Dir, l.progress) }

// endAll ends every process of the lab, and with them its mounts and interfaces,
// and removes its cgroups.
func (l *Lab) endAll(ctx context.Context) error {
	ctx, cancel := within(ctx, 30*time.Second)
	defer cancel()
	// The kernel ends all of a PID namespace with its process 1, and a pidfd of
	// that one becomes readable when all are gone.
	if err := l.state.Holder.end(ctx, unix.SIGKILL); err != nil {
		return err
	}
	if err := endHolders(ctx, l.config.Dir); err != nil {
		return err
	}
	return l.config.removeCgroups(ctx)
}

// wipe ends all and removes what a lab makes in its folder.
func (l *Lab) wipe(ctx context.Context) error {
	if err := l.endAll(ctx); err != nil {
		return err
	}
	// The state last: without it the rest would not be taken for a lab's.
	for _, name := range append(boundSources(), "overlay", "images", "log", stateFile+".new", stateFile) {
		if err := os.RemoveAll(l.config.path(name)); err != nil {
			return fmt.Errorf("remove the lab's files: %w", err)
		}
	}
	return nil
}

// endHolders ends holders of this lab's folder that no state file tells of: the
// process that started one was killed before it could write it down.
func endHolders(ctx context.Context, dir string) error {
	processes, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, entry := range processes {
		environment, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "environ"))
		if err != nil || !slices.Contains(strings.Split(string(environment), "\x00"), labVariable+"="+dir) {
			continue
		}
		var pid int
		if _, err := fmt.Sscan(entry.Name(), &pid); err != nil {
			continue
		}
		p, err := identify(pid)
		if err != nil {
			continue // gone in the meantime
		}
		if err := p.end(ctx, unix.SIGKILL); err != nil {
			return err
		}
	}
	return nil
}
