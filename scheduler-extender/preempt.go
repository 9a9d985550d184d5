package extender

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	wirev1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/carve-gpu/carve/scheduler-extender/cluster"
)

// preempt takes nodes out of those on which kube-scheduler means to evict pods: the nodes whose
// cards would still have no room for the pod. The victims of the others stay as they are. After
// a fault nothing is evicted.
func (s *Server) preempt(ctx context.Context, body []byte, fault error) any {
	var a wirev1.ExtenderPreemptionArgs
	if fault == nil {
		if err := json.Unmarshal(body, &a); err != nil {
			fault = fmt.Errorf("read the request: %w", err)
		}
	}
	switch {
	case fault != nil:
	case a.Pod == nil || a.Pod.UID == "":
		fault = errors.New("read the request: it has no Pod with a UID")
	case a.NodeNameToMetaVictims == nil:
		fault = errors.New("read the request: it has no NodeNameToMetaVictims; set nodeCacheCapable: true for this extender")
	}
	if fault != nil {
		s.log(ctx).Info("preempt: not answered", "error", fault)
		return failure{fault}
	}
	log := s.log(ctx).With("pod", a.Pod.Namespace+"/"+a.Pod.Name, "uid", a.Pod.UID)
	victims := make(map[string][]string, len(a.NodeNameToMetaVictims))
	for node, v := range a.NodeNameToMetaVictims {
		victims[node] = nil
		if v == nil {
			continue
		}
		for _, p := range v.Pods {
			if p != nil {
				victims[node] = append(victims[node], p.UID)
			}
		}
	}
	out := &wirev1.ExtenderPreemptionResult{NodeNameToMetaVictims: map[string]*wirev1.MetaVictims{}}
	pod, err := cluster.PodOf(a.Pod)
	if err == nil {
		keep, refusal := s.Placer.Preempt(pod, victims)
		if refusal != nil {
			err = errors.New(refusal.Sentence())
		}
		for node, v := range a.NodeNameToMetaVictims {
			if keep[node] && v != nil {
				out.NodeNameToMetaVictims[node] = v
			}
		}
	}
	if err != nil {
		// No eviction helps a pod whose request can't be served.
		log.Info("preempt: no node", "error", err)
	} else {
		log.Info("preempt", "nodes", len(victims), "left", len(out.NodeNameToMetaVictims))
	}
	return out
}
