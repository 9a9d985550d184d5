package suite

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/deploy/e2e/image"
	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

// TestFrontIsWhatTheLoaderOpens asks by each name and way that programs use.
func TestFrontIsWhatTheLoaderOpens(t *testing.T) {
	create(t, pod("loader", container("app", share{"gpumem": "4000"})))
	running(t, "loader")
	wantFront(t, "loader", "app")
}

// TestImageWithItsOwnDriverLibrary runs an image that carries a cuda-compat
// libcuda, found through LD_LIBRARY_PATH before any other.
func TestImageWithItsOwnDriverLibrary(t *testing.T) {
	importCompat(t)
	c := container("app", share{"gpumem": "4000"})
	c.Image = "localhost/compat:dev"
	c.Env = []corev1.EnvVar{{Name: "LD_LIBRARY_PATH", Value: compatDir}}
	create(t, pod("compat", c))
	running(t, "compat")
	wantFront(t, "compat", "app")
	wantShare(t, "compat", "app", 4000)
}

const compatDir = "/usr/local/cuda/compat"

// importCompat makes an image with a driver library of its own.
func importCompat(t *testing.T) {
	t.Helper()
	base, err := lab.BaseLayer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	m, err := image.Program("localhost/compat:dev", base, filepath.Join(cluster.Repo, "vgpu/soft/build/gpuprobe"))
	if err != nil {
		t.Fatal(err)
	}
	real, err := filepath.EvalSymlinks(filepath.Join(install.SoftRoot(cluster.Lab.Config().Dir), "usr/lib/x86_64-linux-gnu/libcuda.so.1"))
	if err != nil {
		t.Fatal(err)
	}
	m.Layers = append(m.Layers, new(image.Layer).
		File(compatDir+"/libcuda.so.575.57.08", real, 0o755).
		Symlink(compatDir+"/libcuda.so.1", "libcuda.so.575.57.08").
		Symlink(compatDir+"/libcuda.so", "libcuda.so.1"))
	tar := filepath.Join(t.TempDir(), "compat.tar")
	if err := m.WriteFile(tar); err != nil {
		t.Fatal(err)
	}
	if err := cluster.Lab.ImportImage(t.Context(), tar); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(tar); err != nil {
		t.Fatal(err)
	}
}

// TestVandalism lets a tenant do to its usage file what it can.
func TestVandalism(t *testing.T) {
	create(t, pod("vandal", container("app", share{"gpumem": "4000"})))
	create(t, pod("neighbour", container("app", share{"gpumem": "5000"})))
	running(t, "vandal")
	running(t, "neighbour")
	restarts := agentRestarts(t)
	for _, act := range []struct{ name, script string }{
		{"scribbles over it", "dd if=/dev/urandom of=/usr/lib/carve/usage bs=4096 count=64 conv=notrunc"},
		{"zeroes it", "dd if=/dev/zero of=/usr/lib/carve/usage bs=4096 count=64 conv=notrunc"},
		{"fills it with ones", "tr '\\000' '\\377' </dev/zero | dd of=/usr/lib/carve/usage bs=4096 count=64 conv=notrunc"},
		{"truncates it", ": >/usr/lib/carve/usage"},
		{"grows it", "dd if=/dev/zero of=/usr/lib/carve/usage bs=1M count=64"},
		{"unlinks it", "rm -f /usr/lib/carve/usage"},
		{"replaces it", "mv /usr/bin/busybox /usr/lib/carve/usage"},
		{"writes its limits", "echo 1 >/usr/lib/carve/limits"},
	} {
		t.Run(act.name, func(t *testing.T) {
			r := shell(t, "vandal", "app", "sh", "-c", act.script)
			t.Logf("exit %d %s", r.code, strings.TrimSpace(r.stderr))
			if act.name == "writes its limits" && r.code == 0 {
				t.Error("the limits were writable")
			}
			wantShare(t, "neighbour", "app", 5000)
			eventually(t, "the agent to serve", func(context.Context) string {
				if text := metrics(t); !strings.Contains(text, `pod="neighbour"`) {
					return "no series of the neighbour"
				}
				return ""
			})
		})
	}
	if now := agentRestarts(t); now != restarts {
		t.Errorf("the agent restarted %d times meanwhile", now-restarts)
	}
	// And the tenant has gained nothing.
	m := memory(t, "vandal", "app")
	if len(m) > 0 && m[0].Total > 4000*mib {
		t.Errorf("the vandal now sees %d bytes", m[0].Total)
	}
	if code := allocate(t, "vandal", "app", 4000*mib); code == 0 {
		t.Error("the vandal got more than its share")
	}
	// Its end clears all of it.
	remove(t, "vandal")
	create(t, pod("heir", container("app", share{"gpumem": "4000"})))
	running(t, "heir")
	wantShare(t, "heir", "app", 4000)
}

// TestHostProcessesAreToldApart holds what the report of the card itself says
// against what two tenants hold.
func TestSharesAddUpOnTheCard(t *testing.T) {
	create(t, pod("one", container("app", share{"gpumem": "8000"})))
	create(t, pod("two", container("app", share{"gpumem": "9000"})))
	running(t, "one")
	running(t, "two")
	a := allocateAndHold(t, "one", "app", 1024*mib)
	defer a.end()
	b := allocateAndHold(t, "two", "app", 2048*mib)
	defer b.end()
	eventually(t, "each tenant's use", func(context.Context) string {
		text := metrics(t)
		one := sample(text, "carve_slice_memory_used_bytes", `pod="one"`)
		two := sample(text, "carve_slice_memory_used_bytes", `pod="two"`)
		if one < 1024*mib || two < 2048*mib || one > 3<<30 || two > 4<<30 {
			return "used by one and two: " + strings.Join([]string{format(one), format(two)}, ", ")
		}
		return ""
	})
	if m := memory(t, "one", "app"); m[0].Total-m[0].Free < 1024*mib || m[0].Total-m[0].Free > 3<<30 {
		t.Errorf("one sees %d bytes in use, its own 1 GiB and context expected", m[0].Total-m[0].Free)
	}
}
