package openb

import "math/rand"

// Order is one run of the experiment: the pods one after another, and the nodes by rank,
// which is what decides among equals.
type Order struct {
	Pods  []Pod
	Nodes []Node
}

// Arrivals makes the arrivals of one seed: the pods in random order, and copies of random
// ones after them while the sum is at most ratio times the capacity; of a larger trace random
// pods are left out. It draws in the order of the published simulator, so a seed means the
// same here and there: a number that nobody uses, the shuffle, the copies (the one that is too
// much included), ten numbers for a name, and the nodes' ranks.
func Arrivals(t *Trace, ratio float64, seed int64) Order {
	r := rand.New(rand.NewSource(seed))
	r.Int()
	pods := append([]Pod(nil), t.Pods...)
	r.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	pods = inflate(pods, t.Pods, ratio*float64(t.Capacity()), r)
	for range 10 {
		r.Int()
	}
	o := Order{Pods: pods, Nodes: make([]Node, len(t.Nodes))}
	for i, rank := range r.Perm(len(t.Nodes)) {
		o.Nodes[rank] = t.Nodes[i]
	}
	return o
}

func inflate(pods, trace []Pod, target float64, r *rand.Rand) []Pod {
	var total int64
	for i := range pods {
		total += pods[i].Total()
	}
	if float64(total) > target {
		for float64(total) > target {
			i := r.Intn(len(pods))
			total -= pods[i].Total()
			pods = append(pods[:i], pods[i+1:]...)
		}
		return pods
	}
	for total > 0 {
		p := trace[r.Intn(len(trace))]
		// One card of the pod is looked at, whatever it asks: so did the original.
		if float64(total+p.Milli) > target {
			break
		}
		total += p.Total()
		pods = append(pods, p)
	}
	return pods
}
