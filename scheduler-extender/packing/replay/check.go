package replay

import (
	"fmt"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
)

// check books all decisions again, in plain arithmetic on the trace's own numbers: no node and
// no card holds more than it has, whole cards are nobody else's, models are allowed ones; and
// no pod that was turned away fits at the end, when every node is fuller than it was then.
func check(order openb.Order, c *Cluster, arrivals []Arrival, decisions []placed) error {
	type left struct {
		cpu, mem int64
		cards    []int64
	}
	nodes := make([]left, len(order.Nodes))
	for i, n := range order.Nodes {
		nodes[i] = left{n.CPUMilli, n.MemMiB, make([]int64, n.Cards)}
		for k := range nodes[i].cards {
			nodes[i].cards[k] = openb.Card
		}
	}
	var held int64
	refused := map[string]*fit.Ask{}
	for i, d := range decisions {
		if d.node < 0 {
			refused[arrivals[i].Ask.Key()] = arrivals[i].Ask
			continue
		}
		p, n := &order.Pods[i], &nodes[d.node]
		n.cpu, n.mem = n.cpu-p.CPUMilli, n.mem-p.MemMiB
		cards := []int(nil)
		if len(d.p) > 0 {
			cards = d.p[0]
		}
		if len(cards) != p.Cards {
			return fmt.Errorf("pod %d asked %d cards and got %d", i, p.Cards, len(cards))
		}
		for at, k := range cards {
			if at > 0 && cards[at-1] == k {
				return fmt.Errorf("pod %d has card %d twice", i, k)
			}
			if n.cards[k] -= p.Milli; n.cards[k] < 0 {
				return fmt.Errorf("card %d of node %d holds %d thousandths too many", k, d.node, -n.cards[k])
			}
			held += p.Milli
		}
		if n.cpu < 0 || n.mem < 0 {
			return fmt.Errorf("node %d is short of %d thousandths of a processor, %d MiB", d.node, -n.cpu, -n.mem)
		}
		if len(cards) > 0 && !arrivals[i].Ask.Models.Admits(order.Nodes[d.node].Model) {
			return fmt.Errorf("pod %d is on a card of model %s", i, order.Nodes[d.node].Model)
		}
	}
	if held != c.Held {
		return fmt.Errorf("%d thousandths of cards are held, %d were counted", held, c.Held)
	}
	first := func(*fit.Card, fit.Amount) int64 { return 0 }
	for key, a := range refused {
		for i, n := range c.Nodes {
			if _, ok := fit.Choose(n, a, first); ok {
				return fmt.Errorf("a pod was turned away (%s), and fits on node %d", key, i)
			}
		}
	}
	return nil
}
