package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/monitor/page"
	extender "github.com/carve-gpu/carve/scheduler-extender"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/leader"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/schedconfig"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// extenderOptions are the flags of `carve extender` and its subcommands.
type extenderOptions struct {
	kubeconfig, context   string
	listen, metricsListen string
	tlsDir, tlsSecret     string
	tlsSANs               []string
	client                string
	namespace, service    string
	policy, placement     string
	releaseAfter          time.Duration
	auditEvery            time.Duration
	leader                leaderOptions
	offerTTL              time.Duration
	pageNames             string
	webhook               webhookOptions
	logLevel, logFormat   string
}

func newExtenderCommand() *cobra.Command {
	var o extenderOptions
	cmd := &cobra.Command{
		Use:   "extender",
		Short: "Choose cards for pods, beside kube-scheduler",
		Long: `Choose cards for pods, beside kube-scheduler.

kube-scheduler calls this process by HTTPS to filter nodes and to bind pods
that ask for cards. It shows its certificate and asks for the scheduler's; both
are made at the first start, in a Secret or in --tls-dir. Health and metrics are
on a plain port of their own.

All state comes from the API server; nothing is stored elsewhere. Of several
processes one answers, the holder of a lease; the others stand by with their
ledger up to date and take over within seconds.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			policy, ok := score.ByName(o.policy)
			if o.policy == autoPolicy {
				policy, ok = score.ByName(score.PriceName)
			}
			if !ok {
				return usagef(cmd, "--policy %q: allowed are auto, price, binpack, spread", o.policy)
			}
			if _, err := api.ParsePlacement(o.placement); (err != nil || o.placement == "") && o.placement != cooperative {
				return usagef(cmd, "--placement %q: allowed are offered, planned, auto, cooperative", o.placement)
			}
			if o.releaseAfter < 0 {
				return usagef(cmd, "--release-after %v: 0 or more is needed", o.releaseAfter)
			}
			if o.auditEvery < time.Second {
				return usagef(cmd, "--audit-every %v: a second or more is needed", o.auditEvery)
			}
			if err := o.leader.check(); err != nil {
				return usagef(cmd, "%w", err)
			}
			if err := checkPageNames(cmd, o.pageNames); err != nil {
				return err
			}
			log, err := newLogger(o.logFormat, o.logLevel)
			if err != nil {
				return usagef(cmd, "%w", err)
			}
			return runExtender(cmd.Context(), o, policy, log)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.listen, "listen", ":8443", "address of the verbs, HTTPS")
	f.StringVar(&o.metricsListen, "metrics-listen", ":8080", "address of health, metrics and the live page, HTTP")
	addPageNamesFlag(cmd, &o.pageNames, page.NamesLocal)
	f.StringSliceVar(&o.tlsSANs, "tls-san", nil, "further host names and IP addresses that the server's certificate is for; localhost, the pod's IP and the Service's are found")
	f.StringVar(&o.service, "service", "carve-extender", "Service whose cluster IP the certificate is for; empty for none")
	f.StringVar(&o.policy, "policy", autoPolicy, fmt.Sprintf("where pods go that don't say: price (where it costs least of what the pods that usually come could use), binpack (cards in use first: leaves most nodes idle, for autoscalers that take them away), spread, auto (price from %d cards on, binpack where there are fewer)", pricesFrom))
	f.StringVar(&o.placement, "placement", string(api.Offered), fmt.Sprintf("when pods are placed that don't say: offered (when kube-scheduler asks, among the nodes that it names), planned (before kube-scheduler sees them, among all nodes; until one has room they are held back by a scheduling gate), auto (planned from %d nodes on, where kube-scheduler names a sample), cooperative (kube-scheduler chooses, among nodes that fit)", api.SampledFrom))
	f.DurationVar(&o.releaseAfter, "release-after", 30*time.Second, "how long a planned pod is held back for want of room before kube-scheduler, and so an autoscaler, sees it; 0: for ever")
	f.DurationVar(&o.auditEvery, "audit-every", time.Minute, "how often the ledger is compared with what the API shows; what differs twice running is put right and counted")
	f.DurationVar(&o.offerTTL, "offer-ttl", 15*time.Second, "how long a decision waits for its bind")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn, error")
	f.StringVar(&o.logFormat, "log-format", "text", "text, json")
	o.leader.flags(f)
	o.webhook.flags(f)
	p := cmd.PersistentFlags()
	p.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file (default: $KUBECONFIG, ~/.kube/config, or the pod's service account)")
	p.StringVar(&o.context, "context", "", "context of the kubeconfig")
	p.StringVar(&o.namespace, "namespace", defaultNamespace(), "namespace of the Secret and the Service")
	p.StringVar(&o.tlsSecret, "tls-secret", "carve-extender-tls", "Secret that keeps the certificates")
	p.StringVar(&o.client, "client-name", "kube-scheduler", "common name of the scheduler's certificate")
	p.StringVar(&o.tlsDir, "tls-dir", "", "keep the certificates in this folder instead of the Secret (scheduler-config: the folder that kube-scheduler reads them from)")
	cmd.AddCommand(newCredentialsCommand(&o), newSchedulerConfigCommand(&o))
	return cmd
}

func defaultNamespace() string {
	if n := os.Getenv("POD_NAMESPACE"); n != "" {
		return n
	}
	return api.Namespace
}

func newCredentialsCommand(o *extenderOptions) *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:   "credentials --out DIR",
		Short: "Write what kube-scheduler needs to call the extender",
		Long: `Write ca.crt, client.crt and client.key into a folder, for kube-scheduler.

They are read from the extender's Secret, which is made if there is none yet.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out == "" {
				return usagef(cmd, "--out is needed")
			}
			b, err := o.bundle(cmd.Context())
			if err != nil {
				return err
			}
			return b.WriteClient(out)
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "folder to write to")
	return cmd
}

func newSchedulerConfigCommand(o *extenderOptions) *cobra.Command {
	var base, url, name string
	cmd := &cobra.Command{
		Use:   "scheduler-config --url https://IP:PORT --tls-dir DIR [--base FILE]",
		Short: "Print a KubeSchedulerConfiguration with the extender's entry",
		Long: `Print a KubeSchedulerConfiguration with the extender's entry: alone, or merged
into the one that the scheduler has now. What else is in that stays as it is.

Where the cluster's own scheduler can't be configured, run a kube-scheduler
beside it with the output of --scheduler-name: it serves the pods that name it
in spec.schedulerName, and no others.`,
		Example: `  carve extender scheduler-config --base /etc/kubernetes/scheduler-config.yaml \
    --url https://10.96.0.20:443 --tls-dir /etc/kubernetes/carve > new.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if url == "" || o.tlsDir == "" {
				return usagef(cmd, "--url and --tls-dir are needed")
			}
			var text []byte
			if base != "" {
				var err error
				if text, err = os.ReadFile(base); err != nil {
					return fmt.Errorf("read the scheduler's configuration: %w", err)
				}
			}
			merged, err := schedconfig.Merge(text, schedconfig.Options{URL: url, TLSDir: o.tlsDir, SchedulerName: name})
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(merged)
			return err
		},
	}
	cmd.Flags().StringVar(&base, "base", "", "configuration to merge into")
	cmd.Flags().StringVar(&name, "scheduler-name", "", "configure a second scheduler of this name instead of the cluster's own")
	cmd.Flags().StringVar(&url, "url", "", "URL of the extender as kube-scheduler reaches it")
	return cmd
}

// kube makes the clients. Nothing is throttled on our side: the API server has
// priority and fairness, and a throttled bind would hold a booked share.
func (o *extenderOptions) kube() (kubernetes.Interface, *gpunodes.Client, error) {
	config, err := clusterConfig(o.kubeconfig, o.context)
	if err != nil {
		return nil, nil, err
	}
	config.QPS = -1
	protobuf := rest.CopyConfig(config)
	protobuf.ContentType = "application/vnd.kubernetes.protobuf"
	protobuf.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	kube, err := kubernetes.NewForConfig(protobuf)
	if err != nil {
		return nil, nil, fmt.Errorf("make the client: %w", err)
	}
	nodes, err := gpunodes.New(config)
	return kube, nodes, err
}

// bundle finds the certificates where the flags say.
func (o *extenderOptions) bundle(ctx context.Context) (pki.Bundle, error) {
	if o.tlsDir != "" {
		return pki.FromDir(o.tlsDir, o.client, time.Now())
	}
	kube, _, err := o.kube()
	if err != nil {
		return pki.Bundle{}, err
	}
	return pki.FromSecret(ctx, kube, o.namespace, o.tlsSecret, o.client, time.Now())
}

func runExtender(ctx context.Context, o extenderOptions, policy score.Policy, log *slog.Logger) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	kube, reports, err := o.kube()
	if err != nil {
		return err
	}
	bundle, err := o.bundle(ctx)
	if err != nil {
		return err
	}
	certs, err := pki.NewServer(bundle, o.names(), time.Now)
	if err != nil {
		return err
	}
	books := ledger.New(ledger.Config{OfferTTL: o.offerTTL})
	placer := place.New(books, place.Config{Policy: policy, PricesFrom: o.pricesFrom(), Cooperative: o.placement == cooperative})
	informer := reports.Informer(0, nil)
	source, err := cluster.NewSource(cluster.Config{
		Kube: kube, Namespace: o.namespace, Reports: informer, Ledger: books, Forget: func(uid string) { placer.Forget(uid) }, Log: log, Now: time.Now,
	})
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	lead := leader.New(leader.Config{Kube: kube, Elect: o.leader.elect, Namespace: o.namespace, Lease: o.leader.lease, Pod: o.leader.pod,
		Source: source, Registry: registry, Log: log})
	waker := cluster.Waker{Kube: kube, Ledger: books, Placer: placer, Ready: lead.Leading, Tainted: source.Tainted, Log: log, Now: time.Now}
	tainter := cluster.Tainter{Kube: kube, Ledger: books, Nodes: source, Ready: lead.Leading, Log: log, Now: time.Now}
	server := extender.New(extender.Config{
		Ledger: books, Placer: placer, Binder: cluster.Binder{Kube: kube, Pods: source}, Pods: source, Agents: source,
		Ready: lead.Leading, Serves: lead.Ready, Client: o.client, Registry: registry, Log: log, Now: time.Now,
		Page: page.Handler(page.Config{Source: clusterPage{books, informer.GetStore()}, Names: page.Names(o.pageNames), Done: ctx.Done()}),
	})
	planner := newPlanner(ctx, kube, books, placer, source, lead.Leading, o.releaseAfter, registry, log)
	waker.Planner = planner
	auditor := cluster.NewAuditor(source, o.auditEvery, registry, log)
	resizer := newResizer(ctx, kube, books, source, lead.Leading, registry, log)
	webhook, err := o.newWebhook(kube, bundle, books, registry, log)
	if err != nil {
		return err
	}
	verbs, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	plain, err := net.Listen("tcp", o.metricsListen)
	if err != nil {
		return fmt.Errorf("--metrics-listen: %w", err)
	}
	log.Info("carve extender", "version", buildVersion(), "listen", verbs.Addr().String(), "metrics", plain.Addr().String(), "names", certs.Names())

	var parts sync.WaitGroup
	failures := make(chan error, 2)
	lead.TakeOver = func() {
		planner.Restore()
		go waker.Adopt(ctx, source.Pending()) // it ends with the process
	}
	// The lease is given back when nothing is left that needs it.
	leadCtx, endLead := context.WithCancel(context.WithoutCancel(ctx))
	defer endLead()
	led := make(chan struct{})
	go func() {
		defer close(led)
		if err := lead.Run(leadCtx); err != nil {
			failures <- err
		}
		stop()
	}()
	parts.Go(func() {
		defer stop()
		if err := source.Run(ctx); err != nil && ctx.Err() == nil {
			failures <- err
		}
	})
	parts.Go(func() {
		// Without the webhook pods are still placed, so that its end isn't ours.
		if err := webhook.run(ctx); err != nil && ctx.Err() == nil {
			log.Error("the admission webhook ended", "error", err)
		}
	})
	parts.Go(func() { waker.Run(ctx) })
	parts.Go(func() { resizer.Run(ctx) })
	parts.Go(func() { planner.Run(ctx) })
	parts.Go(func() { auditor.Run(ctx) })
	parts.Go(func() { tainter.Run(ctx) })
	parts.Go(func() { o.findService(ctx, kube, certs, log) })
	err = server.Serve(ctx, verbs, certs.TLS(), plain)
	stop()
	parts.Wait()
	endLead()
	<-led
	select {
	case failure := <-failures:
		return failure
	default:
		return err
	}
}

// cooperative is a placement of the cluster's, not of a pod's.
const cooperative = "cooperative"

// autoPolicy is the policy "price" in a cluster of pricesFrom cards or more.
const (
	autoPolicy = "auto"
	pricesFrom = 64
)

func (o *extenderOptions) pricesFrom() int {
	if o.policy == autoPolicy {
		return pricesFrom
	}
	return 0
}

// names are those that the server is reached by, as far as they are known at
// start.
func (o *extenderOptions) names() []string {
	names := []string{"localhost", "127.0.0.1", "::1"}
	if o.service != "" {
		names = append(names, o.service+"."+o.namespace+".svc")
	}
	if ip := os.Getenv("POD_IP"); ip != "" {
		names = append(names, ip)
	}
	return append(names, o.tlsSANs...)
}

// findService adds the Service's IP to the certificate as soon as there is one.
func (o *extenderOptions) findService(ctx context.Context, kube kubernetes.Interface, certs *pki.Server, log *slog.Logger) {
	if o.service == "" {
		return
	}
	for wait := time.Second; ; wait = min(2*wait, time.Minute) {
		s, err := kube.CoreV1().Services(o.namespace).Get(ctx, o.service, metav1.GetOptions{})
		if err == nil && s.Spec.ClusterIP != "" && s.Spec.ClusterIP != "None" {
			certs.SetNames(append(certs.Names(), s.Spec.ClusterIPs...))
			log.Info("certificate covers the Service", "ips", s.Spec.ClusterIPs)
			return
		}
		if err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) {
			log.Warn("could not look up the Service", "service", o.namespace+"/"+o.service, "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
