package suite

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// withVolume mounts one empty volume into each container, at the path that is
// given for it.
func withVolume(p *corev1.Pod, at map[string]string) *corev1.Pod {
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	for i := range p.Spec.Containers {
		c := &p.Spec.Containers[i]
		if path, ok := at[c.Name]; ok {
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "v", MountPath: path})
		}
	}
	return p
}

// unprivileged takes every right away that a pod can do without.
func unprivileged(p *corev1.Pod) *corev1.Pod {
	no := false
	for i := range p.Spec.Containers {
		p.Spec.Containers[i].SecurityContext = &corev1.SecurityContext{
			AllowPrivilegeEscalation: &no,
			Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		}
	}
	return p
}

// A volume where a share's files are, in two containers: a mount point in it could
// be renamed by the other container, and the mount would go with it.
func TestVolumeWhereTheShareIs(t *testing.T) {
	create(t, unprivileged(withVolume(pod("volume", container("app", share{"gpumem": "2000"}), container("helper", nil)),
		map[string]string{"app": "/usr/lib/carve", "helper": "/x"})))
	running(t, "volume")
	if r := shell(t, "volume", "helper", "sh", "-c", "ls -A /x; mv /x/limits /x/old; echo forged > /x/limits; echo forged > /x/usage"); strings.TrimSpace(r.stdout) != "" {
		t.Errorf("the volume has %q: the mount points of the share's files lie in it", r.stdout)
	}
	if code := allocate(t, "volume", "app", 1000*mib); code != 0 {
		t.Errorf("allocating within the share: CUDA error %d", code)
	}
	if code := allocate(t, "volume", "app", 3000*mib); code != 2 {
		t.Errorf("allocating beyond the share: CUDA error %d, want 2", code)
	}
	// Above it there is no such way: the container doesn't start, and says why.
	create(t, unprivileged(withVolume(pod("above", container("app", share{"gpumem": "2000"})), map[string]string{"app": "/usr/lib"})))
	eventually(t, "the container to be refused with a sentence", func(ctx context.Context) string {
		p := get(ctx, t, "above")
		said := fmt.Sprint(p.Status.ContainerStatuses)
		if !strings.Contains(said, "a volume of the container is mounted at or above /usr/lib") {
			return said
		}
		return ""
	})
	remove(t, "above")
	agree(t)
}
