package suite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/deploy/e2e/audit"
)

// long reports whether the full sizes are to be run: `make test-long` says so.
func long() bool { return os.Getenv("CARVE_E2E_LONG") != "" }

// TestKillMatrix kills each part in each state of a pod's life (`make
// test-long`), or each part and each state at least once (`make test`). What
// runs must go on under the same limits, the pod must end where it should, a
// next pod must be served, and all must agree afterwards.
//
// Cases node-2, share-1, share-2, share-6, share-10.
func TestKillMatrix(t *testing.T) {
	table := newTable(t, "kill-matrix.txt", "part killed × state of the pod")
	anchor := newAnchor(t, share{"gpu": "1", "gpumem": "4000", "gpucores": "10"})
	all := parts()
	for i, s := range states() {
		for j, p := range all {
			// Otherwise the diagonals: down and up again.
			if !long() && j != min(i, len(states())-1-i)%len(all) {
				continue
			}
			table.run(t, s.name, p.name, func(ctx context.Context) (string, error) {
				return cell(ctx, fmt.Sprintf("cell-%d-%d", i, j), s, p, anchor)
			})
		}
	}
}

// cell is one field of the matrix. It returns a remark on what happened.
func cell(ctx context.Context, name string, s state, p part, a *anchor) (remark string, err error) {
	// What the cell before left behind must not be this one's.
	if err := serving(ctx); err != nil {
		return "", err
	}
	scene, err := s.enter(ctx, name)
	defer func() {
		// Whatever happened, the next cell must be able to run.
		if scene.resume != nil {
			err = errors.Join(err, scene.resume(ctx))
		}
		zero := int64(0)
		err = errors.Join(err, erase(ctx, name, &zero), vanish(ctx, name, name+"-next"))
		if scene.clean != nil {
			err = errors.Join(err, scene.clean(ctx))
		}
		if err == nil {
			err = found("after all were gone", settle(ctx))
		}
	}()
	if err != nil {
		return "", fmt.Errorf("bring the pod into the state: %w", err)
	}
	if err := p.kill(ctx); err != nil {
		return "", err
	}
	if scene.resume != nil {
		if err := scene.resume(ctx); err != nil {
			return "", err
		}
		scene.resume = nil
	}
	if scene.early && p.name == "agent" {
		if err := scene.release(ctx); err != nil {
			return "", err
		}
		scene.release = nil
	}
	if err := p.back(ctx); err != nil {
		return "", err
	}
	if err := a.same(ctx); err != nil {
		return "", err
	}
	if scene.release != nil {
		if err := scene.release(ctx); err != nil {
			return "", err
		}
	}
	turnedAway, err := end(ctx, name, scene, p.rejects)
	if err != nil {
		return "", err
	}
	next := idle(name+"-next", small())
	if _, err := post(ctx, next); err != nil {
		return "", err
	}
	again, err := end(ctx, next.Name, scene0(next), p.rejects)
	if err != nil {
		return "", fmt.Errorf("the next pod: %w", err)
	}
	if turnedAway+again > 0 {
		remark = fmt.Sprintf("turned away %d×", turnedAway+again)
	}
	if err := a.same(ctx); err != nil {
		return remark, err
	}
	return remark, found("", settle(ctx))
}

func scene0(p *corev1.Pod) scene { return scene{ended: runs, again: p} }

// end waits until a pod is where it should end. One that the kubelet turned
// away at its admission is made again, as its controller would, where that may
// happen; how often is returned.
func end(ctx context.Context, name string, s scene, rejects bool) (turnedAway int, err error) {
	if s.gone {
		return 0, vanish(ctx, name)
	}
	for {
		err := look(ctx, name, "end as it should", s.ended)
		if err == nil || s.again == nil || !rejects || turnedAway == 3 {
			return turnedAway, err
		}
		p, e := cluster.Client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
		if e != nil || p.Status.Phase != corev1.PodFailed || !admissionFailed(p) {
			return turnedAway, err
		}
		turnedAway++
		if err := vanish(ctx, name); err != nil {
			return turnedAway, err
		}
		if _, err := post(ctx, s.again); err != nil {
			return turnedAway, err
		}
	}
}

// admissionFailed reports whether the kubelet turned the pod away and said why.
func admissionFailed(p *corev1.Pod) bool {
	return p.Status.Reason == "UnexpectedAdmissionError" || strings.HasPrefix(p.Status.Reason, "OutOf")
}

// found makes an error of findings.
func found(when string, f audit.Findings) error {
	if f.OK() {
		return nil
	}
	return errors.New(strings.TrimSpace(when + " " + strings.Join(f.Lines, "; ")))
}

// anchor is a pod that runs through all of it and must not notice.
type anchor struct{ id string }

func newAnchor(t *testing.T, s share) *anchor {
	t.Helper()
	create(t, script("anchor", s, "exec gpuprobe serve 1GiB </dev/null >/dev/null"))
	return &anchor{running(t, "anchor").Status.ContainerStatuses[0].ContainerID}
}

// same checks that the anchor still runs in the same container. Its limits are
// settle's business.
func (a *anchor) same(ctx context.Context) error {
	return look(ctx, "anchor", "run on", func(p *corev1.Pod) error {
		if err := runs(p); err != nil {
			return err
		}
		if s := p.Status.ContainerStatuses[0]; s.ContainerID != a.id || s.RestartCount != 0 {
			return final("a running pod's container was replaced: %s", s.ContainerID)
		}
		return nil
	})
}

// table collects what each cell gave, and is written to a file that make prints
// at the end.
type table struct {
	lines []string
	ok    int
}

func newTable(t *testing.T, file, title string) *table {
	t.Helper()
	b := &table{}
	t.Cleanup(func() {
		text := fmt.Sprintf("%s: %d of %d ok\n%s\n", title, b.ok, len(b.lines), strings.Join(b.lines, "\n"))
		t.Log("\n" + text)
		writeResult(t, file, text)
	})
	return b
}

// writeResult keeps what a test wants shown at the end of a run.
func writeResult(t *testing.T, file, text string) {
	t.Helper()
	dir := filepath.Join(cluster.Repo, "build", "e2e")
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644)
	}
	if err != nil {
		t.Errorf("keep the result: %v", err)
	}
}

// run runs a cell and enters what it gave.
func (b *table) run(t *testing.T, row, column string, cell func(context.Context) (string, error)) {
	t.Run(strings.ReplaceAll(row, ",", "")+"/"+column, func(t *testing.T) {
		begin := time.Now()
		remark, err := cell(t.Context())
		result := "ok"
		if err != nil {
			result = "FAILED: " + strings.ReplaceAll(err.Error(), "\n", "; ")
			t.Error(err)
		} else {
			b.ok++
		}
		if remark != "" {
			result += " (" + remark + ")"
		}
		b.lines = append(b.lines, fmt.Sprintf("%-28s %-11s %5.1f s  %s", row, column, time.Since(begin).Seconds(), result))
	})
}
