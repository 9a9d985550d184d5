package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	wirev1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
)

// load plays kube-scheduler and the API server. It prints the latter's address,
// then reads tasks, a line of JSON each, and answers each with "done", how long
// 99 of 100 filter calls went on at most, in milliseconds, and the number of calls to the API
// server, or with what went wrong.
func load(text string) error {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() {
		// It ends with the process.
		_ = http.Serve(l, http.HandlerFunc(apiServer))
	}()
	fmt.Println("http://" + l.Addr().String())
	c, err := newCaller(o)
	if err != nil {
		return err
	}
	serial := 0
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var do task
		if err := json.Unmarshal(lines.Bytes(), &do); err != nil {
			return err
		}
		if len(do.Race) > 0 {
			bound, err := c.race(do.Race, &serial)
			if err != nil {
				return err
			}
			fmt.Printf("bound %d\n", bound)
			continue
		}
		reply := ""
		c.filters = c.filters[:0]
		for i := range max(do.Pods, len(do.Planned)) {
			serial++
			names := c.names
			if len(do.Planned) > 0 {
				names = do.Planned[i]
			}
			if err := c.schedule(serial, names); err != nil {
				reply = err.Error()
				break
			}
		}
		if reply == "" {
			slices.Sort(c.filters)
			reply = fmt.Sprintf("done %g %d", float64(c.filters[len(c.filters)*99/100].Microseconds())/1000, calls.Swap(0))
		}
		fmt.Println(strings.ReplaceAll(reply, "\n", " "))
	}
	return nil
}

// task is a number of pods to be scheduled, each with all nodes, or the nodes of pods that
// were planned already.
type task struct {
	Pods    int        `json:",omitempty"`
	Planned [][]string `json:",omitempty"`
	// Race are nodes for whose cards racers callers compete, one node after the other.
	Race []string `json:",omitempty"`
}

// racers call at the same time.
const racers = 16

// race has racers filter and bind a pod each on one node at the same time, for each of the
// nodes, and counts those that were bound.
func (c *caller) race(nodes []string, serial *int) (bound int, err error) {
	var won atomic.Int64
	faults := make(chan error, racers*len(nodes))
	for _, n := range nodes {
		var all sync.WaitGroup
		for range racers {
			*serial++
			p := pod(*serial)
			p.Spec.Containers[0].Resources.Limits[api.ResourceMemory] = resource.MustParse(fmt.Sprint(raceMiB))
			p.Spec.Containers[0].Resources.Limits[api.ResourceCores] = resource.MustParse("0")
			all.Go(func() {
				var f wirev1.ExtenderFilterResult
				if err := c.post("filter", &wirev1.ExtenderArgs{Pod: p, NodeNames: &[]string{n}}, &f); err != nil {
					faults <- err
					return
				}
				if f.NodeNames == nil || len(*f.NodeNames) == 0 {
					return // refused
				}
				var b wirev1.ExtenderBindingResult
				if err := c.post("bind", &wirev1.ExtenderBindingArgs{PodName: p.Name, PodNamespace: p.Namespace, PodUID: p.UID, Node: n}, &b); err != nil {
					faults <- err
					return
				}
				if b.Error == "" {
					won.Add(1)
				}
			})
		}
		all.Wait()
	}
	close(faults)
	return int(won.Load()), <-faults
}

// raceMiB is what a racer asks of a card: more than half of it.
const raceMiB = 50_000

// calls counts what the API server was asked to do, reads included.
var calls atomic.Int64

// apiServer takes every Binding.
func apiServer(w http.ResponseWriter, r *http.Request) {
	calls.Add(1)
	if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, "/binding") {
		http.NotFound(w, r)
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","code":201}`)
}

// caller does what kube-scheduler does for one pod.
type caller struct {
	url    string
	client *http.Client
	names  []string

	filters []time.Duration // how long each call went on, of late
}

func newCaller(o order) (*caller, error) {
	cert, err := tls.LoadX509KeyPair(filepath.Join(o.Credentials, pki.ClientCert), filepath.Join(o.Credentials, pki.ClientKey))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(filepath.Join(o.Credentials, pki.CACert))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	c := &caller{url: o.URL, client: &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{cert}}, ForceAttemptHTTP2: true}}}
	for i := range o.Nodes {
		c.names = append(c.names, nodeName(i))
	}
	return c, nil
}

// shapes are the requests that come in turn.
var shapes = []struct{ mem, cores string }{{"8000", "10"}, {"16000", "20"}, {"4000", "5"}, {"24000", "30"}, {"2000", "0"}}

// pod is of the size that pods in a cluster have.
func pod(serial int) *corev1.Pod {
	shape := shapes[serial%len(shapes)]
	uid := fmt.Sprintf("%08x-bbbb-4000-8000-%012x", serial, serial)
	p := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "inference", Name: fmt.Sprintf("model-server-7d9c6f5b8d-%d", serial), UID: types.UID(uid),
			ResourceVersion: fmt.Sprint(serial), CreationTimestamp: metav1.Now(),
			Labels:      map[string]string{"app.kubernetes.io/name": "model-server", "app.kubernetes.io/instance": "prod", "pod-template-hash": "7d9c6f5b8d"},
			Annotations: map[string]string{"prometheus.io/scrape": "true", "prometheus.io/port": "8000"}},
		Spec: corev1.PodSpec{SchedulerName: "default-scheduler", ServiceAccountName: "model-server", RestartPolicy: corev1.RestartPolicyAlways,
			Tolerations: []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
			Volumes:     []corev1.Volume{{Name: "models", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "models"}}}}},
	}
	app := corev1.Container{Name: "app", Image: "registry.example/inference/model-server:1.42.0", Args: []string{"--model", "/models/current", "--port", "8000"},
		Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
			api.ResourceGPU: resource.MustParse("1"), api.ResourceMemory: resource.MustParse(shape.mem), api.ResourceCores: resource.MustParse(shape.cores),
			corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("16Gi")}},
		VolumeMounts: []corev1.VolumeMount{{Name: "models", MountPath: "/models", ReadOnly: true}}}
	app.Resources.Requests = app.Resources.Limits
	for i := range 20 {
		app.Env = append(app.Env, corev1.EnvVar{Name: fmt.Sprint("SETTING_", i), Value: "a value of usual length"})
	}
	p.Spec.Containers = []corev1.Container{app, {Name: "metrics", Image: "registry.example/metrics:2.0"}}
	return p
}

func (c *caller) post(verb string, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	resp, err := c.client.Post(c.url+"/"+verb, "application/json", bytes.NewReader(b))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", verb, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(out)
}

func (c *caller) schedule(serial int, names []string) error {
	p := pod(serial)
	args := &wirev1.ExtenderArgs{Pod: p, NodeNames: &names}
	var f wirev1.ExtenderFilterResult
	start := time.Now()
	if err := c.post("filter", args, &f); err != nil {
		return err
	}
	c.filters = append(c.filters, time.Since(start))
	if f.Error != "" || f.NodeNames == nil || len(*f.NodeNames) == 0 {
		return fmt.Errorf("filter of pod %d: %s %v", serial, f.Error, f.FailedNodes)
	}
	node := (*f.NodeNames)[0]
	if len(*f.NodeNames) > 1 {
		var list wirev1.HostPriorityList
		if err := c.post("prioritize", &wirev1.ExtenderArgs{Pod: p, NodeNames: f.NodeNames}, &list); err != nil {
			return err
		}
		best := int64(-1)
		for _, h := range list {
			if h.Score > best {
				node, best = h.Host, h.Score
			}
		}
	}
	var b wirev1.ExtenderBindingResult
	if err := c.post("bind", &wirev1.ExtenderBindingArgs{PodName: p.Name, PodNamespace: p.Namespace, PodUID: p.UID, Node: node}, &b); err != nil {
		return err
	}
	if b.Error != "" {
		return fmt.Errorf("bind of pod %d: %s", serial, b.Error)
	}
	return nil
}
