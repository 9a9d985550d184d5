package lab

import (
	"bytes"
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"text/template"
)

//go:embed files
var files embed.FS

// writeConfigs writes the programs' configuration into the lab's folder, from
// where it is seen at /etc/kubernetes.
func (c Config) writeConfigs() error {
	for _, name := range []string{"containerd.toml", "kubelet.yaml", "kube-proxy.yaml", "scheduler.yaml", "cni.conflist", "audit.yaml"} {
		if name == "audit.yaml" && c.Audit == "" {
			continue
		}
		data, err := c.render(name)
		if err != nil {
			return err
		}
		if name == "scheduler.yaml" && c.SchedulerConfig != "" {
			if data, err = os.ReadFile(c.SchedulerConfig); err != nil {
				return fmt.Errorf("read the scheduler's configuration: %w", err)
			}
		}
		if err := c.writeConfig(name, data); err != nil {
			return err
		}
	}
	return nil
}

func (c Config) writeConfig(name string, data []byte) error {
	path := c.path("kubernetes", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	if err := replaceFile(path, data, 0o644); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

func (c Config) render(name string) ([]byte, error) {
	t, err := template.New(name).Option("missingkey=error").ParseFS(files, "files/"+name)
	if err != nil {
		return nil, fmt.Errorf("configuration %s: %w", name, err)
	}
	var out bytes.Buffer
	err = t.ExecuteTemplate(&out, name, struct {
		Config
		Cgroup, ClusterPods string
	}{c, c.cgroup(), clusterPods})
	if err != nil {
		return nil, fmt.Errorf("configuration %s: %w", name, err)
	}
	return out.Bytes(), nil
}
