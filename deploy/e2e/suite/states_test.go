package suite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
)

func notFound(err error) bool { return apierrors.IsNotFound(err) }

// state is a state of a pod's life in which a part is killed.
type state struct {
	name string
	// enter brings a new pod of that name into the state.
	enter func(ctx context.Context, name string) (scene, error)
}

// scene is a pod in a state.
type scene struct {
	// resume is called right after the kill: it lets go of what was stopped to
	// hold the state, so that everybody can come back.
	resume func(context.Context) error
	// release lets the pod go on, once all are back; early for the agent, whose
	// hook can't be linked while a container takes its time to stop.
	release func(context.Context) error
	early   bool
	// ended says what is missing until the pod is where it should end.
	ended func(*corev1.Pod) error
	// gone says that it should end by being gone.
	gone bool
	// again is the pod to create anew if the kubelet turned this one away, as
	// its controller would.
	again *corev1.Pod
	// clean removes what else was made.
	clean func(context.Context) error
}

// small is what the pods of the matrix ask for; the anchor holds as much, and
// there is room for a few more.
func small() share { return share{"gpu": "1", "gpumem": "3000", "gpucores": "5"} }

// idle is a pod with a share that idles, and that goes as soon as it is told to.
func idle(name string, s share) *corev1.Pod {
	return script(name, s, `trap "exit 0" TERM; sleep 1000000 & wait`)
}

// script is a pod whose container runs a shell script.
func script(name string, s share, text string) *corev1.Pod {
	p := pod(name, container("app", s))
	p.Spec.Containers[0].Command = []string{"/usr/bin/sh", "-c", text}
	return p
}

// states are the moments of a pod's life, in order.
func states() []state {
	return []state{
		{"pending, no room", enterPending},
		{"between filter and bind", enterBinding},
		{"bound, not admitted", enterBound},
		{"image is pulled", enterPulling},
		{"in PreStart", enterPreStart},
		{"container created", enterCreated},
		{"running, allocating", enterRunning},
		{"resize asked for", enterResizeAsked},
		{"resize granted", enterResizeGranted},
		{"terminating", enterTerminating},
		{"completed, container kept", enterCompleted},
		{"crash-looping", enterCrashing},
	}
}

func enterPending(ctx context.Context, name string) (s scene, err error) {
	// Both cards are as good as full; what is asked for fits once the blocker
	// is gone.
	blocker := name + "-blocker"
	if _, err = post(ctx, idle(blocker, share{"gpu": "2", "gpumem": "60000"})); err != nil {
		return s, err
	}
	s.clean = func(ctx context.Context) error { return vanish(ctx, blocker) }
	if err = look(ctx, blocker, "run", runs); err != nil {
		return s, err
	}
	p := idle(name, share{"gpu": "2", "gpumem": "30000"})
	if _, err = post(ctx, p); err != nil {
		return s, err
	}
	refused := func(p *corev1.Pod) error {
		switch {
		case p.Spec.NodeName != "":
			return final("it was bound where there is no room for it")
		case !strings.Contains(unscheduled(p), "30000"):
			return errors.New("it isn't refused yet")
		}
		return nil
	}
	s.release = func(ctx context.Context) error {
		if err := look(ctx, name, "wait still", refused); err != nil {
			return err
		}
		return vanish(ctx, blocker)
	}
	s.ended, s.again = runs, p
	return s, look(ctx, name, "be refused", refused)
}

const slowClass = "carve-e2e-slow"

// enterBinding lets kube-scheduler wait between its filters and the bind: for a
// volume that the pod claims and that nobody makes until release.
func enterBinding(ctx context.Context, name string) (s scene, err error) {
	core := cluster.Client.CoreV1()
	wait := storagev1.VolumeBindingWaitForFirstConsumer
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: slowClass}, Provisioner: "carve.dev/nobody", VolumeBindingMode: &wait}
	if _, err = cluster.Client.StorageV1().StorageClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return s, err
	}
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}
	class0 := slowClass
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: ns},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class0, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: size},
		},
	}
	if claim, err = core.PersistentVolumeClaims(ns).Create(ctx, claim, metav1.CreateOptions{}); err != nil {
		return s, err
	}
	s.clean = func(ctx context.Context) error {
		err := await(ctx, "the claim of "+name+" to be deleted", func(ctx context.Context) error {
			if err := core.PersistentVolumeClaims(ns).Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !notFound(err) {
				return err
			}
			if err := core.PersistentVolumes().Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !notFound(err) {
				return err
			}
			return nil
		})
		return err
	}
	p := idle(name, small())
	p.Spec.Volumes = []corev1.Volume{{Name: "slow", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}}}
	if _, err = post(ctx, p); err != nil {
		return s, err
	}
	s.release = func(ctx context.Context) error {
		dir := corev1.HostPathDirectoryOrCreate
		volume := &corev1.PersistentVolume{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.PersistentVolumeSpec{
				StorageClassName: slowClass, Capacity: size, AccessModes: claim.Spec.AccessModes,
				PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
				ClaimRef:                      &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: ns, Name: name, UID: claim.UID},
				PersistentVolumeSource:        corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/carve-e2e/" + name, Type: &dir}},
			},
		}
		return await(ctx, "the volume of "+name+" to be made", func(ctx context.Context) error {
			_, err := core.PersistentVolumes().Create(ctx, volume, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			return err
		})
	}
	s.ended, s.again = runs, p
	return s, await(ctx, "kube-scheduler to wait for the volume of "+name, func(ctx context.Context) error {
		c, err := core.PersistentVolumeClaims(ns).Get(ctx, name, metav1.GetOptions{})
		if err == nil && c.Annotations["volume.kubernetes.io/selected-node"] == "" {
			err = errors.New("no node was chosen yet")
		}
		return err
	})
}

func enterBound(ctx context.Context, name string) (s scene, err error) {
	// A kubelet that is stopped admits nothing.
	if err = signalComponent("kubelet", unix.SIGSTOP); err != nil {
		return s, err
	}
	s.resume = func(context.Context) error { return signalComponent("kubelet", unix.SIGCONT) }
	p := idle(name, small())
	if _, err = post(ctx, p); err != nil {
		return s, err
	}
	s.ended, s.again = runs, p
	return s, look(ctx, name, "be bound", func(p *corev1.Pod) error {
		if p.Spec.NodeName == "" {
			return errors.New("it isn't")
		}
		return nil
	})
}

// poke changes a pod, so that the kubelet looks at it now and not when its own
// back-off is over.
func poke(ctx context.Context, name string) error {
	return await(ctx, "pod "+name+" to be touched", func(ctx context.Context) error {
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{"poked":"%d"}}}`, time.Now().UnixNano())
		_, err := cluster.Client.CoreV1().Pods(ns).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	})
}

// absentImage gives a pod an image that isn't there, and returns what brings it.
func absentImage(p *corev1.Pod) (bring func(context.Context) error, drop func(context.Context) error) {
	ref := "localhost/" + p.Name + ":dev"
	p.Spec.Containers[0].Image = ref
	bring = func(ctx context.Context) error {
		return await(ctx, "image "+ref+" to be there", func(ctx context.Context) error {
			_, err := cluster.Lab.Output(ctx, "ctr", "--namespace", "k8s.io", "images", "tag", "--force", probeImage, ref)
			return err
		})
	}
	drop = func(ctx context.Context) error {
		_, err := cluster.Lab.Output(ctx, "ctr", "--namespace", "k8s.io", "images", "rm", ref)
		return err
	}
	return bring, drop
}

// noImage says what is missing until the kubelet has admitted a pod and found
// that its image isn't there.
func noImage(p *corev1.Pod) error {
	if p.Status.Phase == corev1.PodFailed {
		return final("it failed")
	}
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && (w.Reason == "ErrImageNeverPull" || w.Reason == "ErrImagePull" || w.Reason == "ImagePullBackOff") {
			return nil
		}
	}
	return errors.New("it doesn't wait for its image")
}

func enterPulling(ctx context.Context, name string) (s scene, err error) {
	p := idle(name, small())
	bring, drop := absentImage(p)
	if _, err = post(ctx, p); err != nil {
		return s, err
	}
	s.clean = drop
	s.release = func(ctx context.Context) error { return errors.Join(bring(ctx), poke(ctx, name)) }
	s.ended, s.again = runs, p
	return s, look(ctx, name, "wait for its image", noImage)
}

// halt stops the process of one of carve's own containers, and returns what lets
// it go on.
func halt(ctx context.Context, app, container string) (goOn func(context.Context) error, err error) {
	c, err := running1(ctx, app, container)
	if err != nil {
		return nil, err
	}
	pid, err := firstProcess(ctx, c.Id)
	if err != nil {
		return nil, err
	}
	goOn = func(ctx context.Context) error {
		// It may be the part that was killed, and then there is none.
		if err := signalContainer(ctx, c.Id, unix.SIGCONT); err != nil && exists(onNode("/proc", fmt.Sprint(pid))) == nil {
			return err
		}
		return nil
	}
	return goOn, signalContainer(ctx, c.Id, unix.SIGSTOP)
}

// enterPreStart stops the agent and only then lets the kubelet find the image:
// what comes next is PreStart, which then gets no answer.
func enterPreStart(ctx context.Context, name string) (s scene, err error) {
	p := idle(name, small())
	bring, drop := absentImage(p)
	if _, err = post(ctx, p); err != nil {
		return s, err
	}
	s.clean = drop
	if err = look(ctx, name, "wait for its image", noImage); err != nil {
		return s, err
	}
	if s.resume, err = halt(ctx, "carve-node", "node"); err != nil {
		return s, err
	}
	s.ended, s.again = runs, p
	if err = errors.Join(bring(ctx), poke(ctx, name)); err != nil {
		return s, err
	}
	return s, await(ctx, "the kubelet to find the image of "+name, func(ctx context.Context) error {
		events, err := cluster.Client.CoreV1().Events(ns).List(ctx, metav1.ListOptions{FieldSelector: "reason=Pulled,involvedObject.name=" + name})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("it hasn't")
		}
		return err
	})
}

func enterRunning(ctx context.Context, name string) (s scene, err error) {
	// It allocates all the time, and some of its processes die with what they
	// hold, until it is told to rest.
	p := withState(script(name, small(), `while :; do
		gpuprobe alloc 500MiB >/dev/null
		gpuprobe serve 200MiB </dev/null >/dev/null & sleep 0.3; kill -9 $!; wait
		while [ -e /state/rest ]; do sleep 0.1; done
	done`))
	if p, err = post(ctx, p); err != nil {
		return s, err
	}
	s.release = func(context.Context) error { return os.WriteFile(emptyDir(p, "rest"), nil, 0o644) }
	id := ""
	if err = look(ctx, name, "run", func(p *corev1.Pod) error {
		if err := runs(p); err != nil {
			return err
		}
		id = p.Status.ContainerStatuses[0].ContainerID
		return nil
	}); err != nil {
		return s, err
	}
	s.ended = func(p *corev1.Pod) error {
		if err := runs(p); err != nil {
			return err
		}
		if now := p.Status.ContainerStatuses[0]; now.ContainerID != id || now.RestartCount != 0 {
			return final("its container was replaced: %s, %d restarts", now.ContainerID, now.RestartCount)
		}
		return nil
	}
	return s, nil
}

// emptyDir is a file of a pod's emptyDir volume, as this process reaches it.
func emptyDir(p *corev1.Pod, file string) string {
	return onNode("/var/lib/kubelet/pods", string(p.UID), "volumes/kubernetes.io~empty-dir/state", file)
}

// withState mounts an emptyDir at /state.
func withState(p *corev1.Pod) *corev1.Pod {
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "state", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts, corev1.VolumeMount{Name: "state", MountPath: "/state"})
	return p
}

// exists says that a file is missing.
func exists(path string) error {
	_, err := os.Stat(path)
	return err
}

func enterTerminating(ctx context.Context, name string) (s scene, err error) {
	// It was told to go and takes its time.
	p := withState(script(name, small(), `trap 'touch /state/told; while [ ! -e /state/go ]; do sleep 0.1; done; exit 0' TERM; while :; do sleep 0.1; done`))
	long := int64(3600)
	p.Spec.TerminationGracePeriodSeconds = &long
	if p, err = post(ctx, p); err != nil {
		return s, err
	}
	if err = look(ctx, name, "run", runs); err != nil {
		return s, err
	}
	if err = erase(ctx, name, nil); err != nil {
		return s, err
	}
	s.gone, s.early = true, true
	s.release = func(context.Context) error { return os.WriteFile(emptyDir(p, "go"), nil, 0o644) }
	return s, await(ctx, "pod "+name+" to be told to go", func(context.Context) error { return exists(emptyDir(p, "told")) })
}

func enterCompleted(ctx context.Context, name string) (s scene, err error) {
	if _, err = post(ctx, script(name, small(), "gpuprobe alloc 1GiB")); err != nil {
		return s, err
	}
	s.ended = func(p *corev1.Pod) error {
		if p.Status.Phase != corev1.PodSucceeded {
			return errors.New("it didn't succeed")
		}
		return nil
	}
	return s, look(ctx, name, "succeed", s.ended)
}

func enterCrashing(ctx context.Context, name string) (s scene, err error) {
	p := withState(script(name, small(), `[ -e /state/ok ] && exec sleep 1000000; gpuprobe alloc 100MiB; sleep 0.2; exit 1`))
	p.Spec.RestartPolicy = corev1.RestartPolicyAlways
	if p, err = post(ctx, p); err != nil {
		return s, err
	}
	s.release = func(context.Context) error { return os.WriteFile(emptyDir(p, "ok"), nil, 0o644) }
	s.ended, s.again = runs, p
	return s, look(ctx, name, "crash twice", func(p *corev1.Pod) error {
		if p.Status.Phase == corev1.PodFailed {
			return final("it failed")
		}
		if len(p.Status.ContainerStatuses) == 0 || p.Status.ContainerStatuses[0].RestartCount < 2 {
			return errors.New("it hasn't")
		}
		return nil
	})
}

func enterCreated(ctx context.Context, name string) (s scene, err error) {
	h, stop, err := holdCreated(ctx, name)
	if err != nil {
		return s, err
	}
	s.resume = func(context.Context) error { h.release(); return nil }
	s.clean = func(context.Context) error { stop(); return nil }
	p := idle(name, small())
	// A kubelet that dies takes the start with it: the attempt ends, and is
	// followed by another.
	p.Spec.RestartPolicy = corev1.RestartPolicyAlways
	if _, err = post(ctx, p); err != nil {
		return s, err
	}
	s.ended, s.again = runs, p
	select {
	case <-h.reached:
		return s, nil
	case <-time.After(patience):
		return s, errors.New("the container was never started")
	}
}

// resizable is a pod that runs with 3000 MiB. In the end it must have 5000, in
// the same container.
func resizable(ctx context.Context, name string) (s scene, err error) {
	if _, err = post(ctx, script(name, small(), "exec gpuprobe serve 1GiB </dev/null >/dev/null")); err != nil {
		return s, err
	}
	id := ""
	s.ended = func(p *corev1.Pod) error {
		if err := runs(p); err != nil {
			return err
		}
		if p.Status.ContainerStatuses[0].ContainerID != id {
			return final("its container was replaced")
		}
		g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
		if err != nil {
			return err
		}
		if g.Generation != 2 || g.Containers["app"][0].MemMiB != 5000 {
			return fmt.Errorf("its grant is of generation %d, with %+v; result %q", g.Generation, g.Containers["app"], p.Annotations[api.AnnotationResizeResult])
		}
		return nil
	}
	return s, look(ctx, name, "run", func(p *corev1.Pod) error {
		if err := runs(p); err != nil {
			return err
		}
		id = p.Status.ContainerStatuses[0].ContainerID
		return nil
	})
}

// askResize asks for other memory for a pod's app container.
func askResize(ctx context.Context, name string, memMiB int64) error {
	request := fmt.Sprintf(`{"v":1,"id":"%d","containers":{"app":{"memMiB":%d}}}`, time.Now().UnixNano(), memMiB)
	_, err := cluster.Client.CoreV1().Pods(ns).Patch(ctx, name, types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, api.AnnotationResize, request), metav1.PatchOptions{})
	return err
}

// enterResizeAsked stops the extender, so that nobody answers.
func enterResizeAsked(ctx context.Context, name string) (s scene, err error) {
	if s, err = resizable(ctx, name); err != nil {
		return s, err
	}
	if s.resume, err = halt(ctx, "carve-extender", "extender"); err != nil {
		return s, err
	}
	return s, askResize(ctx, name, 5000)
}

// enterResizeGranted stops the agent, so that the new limits aren't in force.
func enterResizeGranted(ctx context.Context, name string) (s scene, err error) {
	if s, err = resizable(ctx, name); err != nil {
		return s, err
	}
	if s.resume, err = halt(ctx, "carve-node", "node"); err != nil {
		return s, err
	}
	if err = askResize(ctx, name, 5000); err != nil {
		return s, err
	}
	return s, look(ctx, name, "be granted more", s.ended)
}
