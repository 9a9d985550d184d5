package suite

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/region"
)

// limitsFile is the one that the node keeps for the container app of a pod.
func limitsFile(p *corev1.Pod) string {
	return onNode(slicesDir, string(p.UID), "app", "limits")
}

// writeAt writes into a file of the node at its begin.
func writeAt(t *testing.T, path string, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
}

// wantSees waits until a container sees a card of so many MiB.
func wantSees(t *testing.T, pod string, limitMiB uint64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s to see %d MiB", pod, limitMiB), func(context.Context) string {
		m := memory(t, pod, "app")
		if len(m) != 1 || m[0].Total != limitMiB<<20 {
			return fmt.Sprintf("it sees %+v", m)
		}
		return ""
	})
}

// wantEvent waits for a word in an event of a pod.
func wantEvent(t *testing.T, pod, reason, word string) {
	t.Helper()
	eventually(t, "event "+reason+" with "+word, func(ctx context.Context) string {
		if all := fmt.Sprint(events(ctx, t, pod, reason)); !strings.Contains(all, word) {
			return all
		}
		return ""
	})
}

// TestLimitsFileIsDamaged overwrites some of a running share's limits file: a resize
// that follows is in force in the container, and without one the file comes right of
// itself, too.
func TestLimitsFileIsDamaged(t *testing.T) {
	create(t, pod("damaged", container("app", share{"gpumem": "8000"})))
	p := running(t, "damaged")
	before := sample(metrics(t), "carve_limits_restored_total", "")
	writeAt(t, limitsFile(p), []byte("XXXX"))
	wantResized(t, "damaged", "--gpumem", "9000")
	wantSees(t, "damaged", 9000)
	writeAt(t, limitsFile(p), make([]byte, region.LimitsBytes))
	eventually(t, "the file to be put right", func(context.Context) string {
		if _, err := region.ReadLimits(limitsFile(p)); err != nil {
			return err.Error()
		}
		return ""
	})
	wantSees(t, "damaged", 9000)
	if code := allocate(t, "damaged", "app", 8500*mib); code != 0 {
		t.Errorf("allocating within the share: CUDA error %d", code)
	}
	wantEvent(t, "damaged", "LimitsRestored", "was damaged; it was put right in place")
	if now := sample(metrics(t), "carve_limits_restored_total", ""); now < before+2 {
		t.Errorf("%v files were put right, before %v", now, before)
	}
	agree(t)
}

// TestLimitsFileIsForged has a pod that mounts /run/carve grant itself a card.
func TestLimitsFileIsForged(t *testing.T) {
	p := pod("forger", container("app", share{"gpumem": "2000"}))
	p.Spec.Volumes = []corev1.Volume{{Name: "h", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/run/carve"}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "h", MountPath: "/hr"}}
	create(t, p)
	p = running(t, "forger")
	l, err := region.ReadLimits(limitsFile(p))
	if err != nil {
		t.Fatal(err)
	}
	l.Cards[0].LimitBytes = 70000 << 20
	made := filepath.Join(t.TempDir(), "limits")
	if err := region.CreateLimits(made, l); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(made)
	if err != nil {
		t.Fatal(err)
	}
	b = b[:region.LimitsBytes] // what stands behind is too long for an argument
	r := shell(t, "forger", "app", "sh", "-c", fmt.Sprintf("echo %s | base64 -d | dd of=/hr/slices/%s/app/limits conv=notrunc && echo written", base64.StdEncoding.EncodeToString(b), p.UID))
	if !strings.Contains(r.stdout, "written") {
		t.Fatalf("the pod can't forge: %+v", r)
	}
	wantEvent(t, "forger", "LimitsRestored", "said something else than was granted; it was put right in place")
	wantSees(t, "forger", 2000)
	if code := allocate(t, "forger", "app", 60000*mib); code != 2 {
		t.Errorf("allocating what it granted itself: CUDA error %d, want 2", code)
	}
	agree(t)
}

// TestLimitsFileIsRemoved takes the limits file of a running share away: nothing can
// be changed for it until it starts anew, and what it has is given to nobody else.
func TestLimitsFileIsRemoved(t *testing.T) {
	p := pod("cut", container("app", share{"gpumem": "50000"}))
	p.Spec.RestartPolicy = corev1.RestartPolicyAlways
	create(t, p)
	p = running(t, "cut")
	if err := os.Remove(limitsFile(p)); err != nil {
		t.Fatal(err)
	}
	r, said, code := resize(t, "cut", "--gpumem", "2000")
	if code != 1 || r.Outcome != api.ResizeRefused || !strings.Contains(r.Message, "limits file that is no longer the node's") {
		t.Errorf("carve resize: exit %d, %+v; %s", code, r, said)
	}
	if g := grant(t, get(t.Context(), t, "cut")); g.Containers["app"][0].MemMiB != 50000 {
		t.Errorf("granted are %+v", g.Containers)
	}
	wantEvent(t, "cut", "LimitsLost", "it keeps the limits that it has")
	eventually(t, "the report to say so", func(ctx context.Context) string {
		for _, c := range cards(ctx, t) {
			for _, s := range c.Slices {
				if s.PodUID == string(p.UID) && s.Fault != "" {
					return ""
				}
			}
		}
		return "it doesn't"
	})
	if out := plugin(t, "slices").stdout; !strings.Contains(out, "active, cut off") || !strings.Contains(out, "no longer the node's") {
		t.Errorf("carve slices:\n%s", out)
	}
	wantSaid(t, "explain", plugin(t, "explain", "pod", "cut", "-n", ns).stdout, "cut-off", "active, generation", "cut off", "delete its pod")
	if n := sample(metrics(t), "carve_cut_off_containers", ""); n != 1 {
		t.Errorf("%v containers are cut off", n)
	}
	// It has what it had.
	if code := allocate(t, "cut", "app", 45000*mib); code != 0 {
		t.Errorf("allocating what was granted: CUDA error %d", code)
	}
	// So has the next attempt, with the node's file.
	all, err := unfinished(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	old := ""
	for _, c := range all {
		if c.Labels[labelPodUID] == string(p.UID) {
			old = c.Id
			if err := signalContainer(t.Context(), c.Id, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "the container to start anew", func(ctx context.Context) string {
		s := get(ctx, t, "cut").Status.ContainerStatuses
		if len(s) != 1 || s[0].State.Running == nil || strings.HasSuffix(s[0].ContainerID, old) {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
	wantResized(t, "cut", "--gpumem", "2000")
	wantSees(t, "cut", 2000)
	agree(t)
}
