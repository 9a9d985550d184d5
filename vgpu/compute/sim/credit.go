package sim

// #cgo CFLAGS: -std=c11 -O2
// #include "credit.h"
import "C"

// credit.c, credit.h and carve_region.h are links to the library's own files, so that
// this package is built anew when they change.

// account is a process' credit and what it knows of its functions.
type account struct {
	credit C.struct_carve_credit
	costs  []C.struct_carve_cost
	terms  C.struct_carve_terms
}

// sample is a launch whose begin and end are wanted.
type sample struct {
	ticket     C.struct_carve_ticket
	function   int
	begin, end int64 // -1: not yet
}

// pace is what the agent publishes of a card.
type pace struct{ c C.struct_carve_pace }

func (p *pace) publish(at, value int64, contexts, most int) {
	point := &p.c.points[uint64(p.c.count)%C.CARVE_PACE_POINTS]
	point.at, point.value = C.uint64_t(at), C.uint64_t(value)
	p.c.contexts, p.c.most = C.uint32_t(contexts), C.uint32_t(most)
	p.c.count++
}

type verdict int

const (
	goes      = verdict(C.CARVE_GO)
	sleeps    = verdict(C.CARVE_SLEEP)
	waitsDone = verdict(C.CARVE_WAIT_DONE)
	waitsGate = verdict(C.CARVE_WAIT_GATE)
)

func (a *account) ask(function int, now int64, ticket *C.struct_carve_ticket) (verdict, int64) {
	var until C.uint64_t
	v := C.carve_credit_ask(&a.credit, &a.costs[function], &a.terms, C.uint64_t(now), ticket, &until)
	return verdict(v), int64(until)
}

func (a *account) done(s *sample, p *pace, now int64) {
	C.carve_credit_done(&a.credit, &a.costs[s.function], &s.ticket, a.terms.share_ppm,
		C.uint64_t(s.begin), C.uint64_t(s.end), &p.c, C.uint64_t(now))
}

// clocks is a pace at which time passes undivided: what a plain measurement by
// events charges.
var clocks pace

// divided is the pace between begin and end of a launch that is divided by the number
// of processes at its end.
func (a *account) divided(s *sample, n int) *pace {
	var p pace
	from := max(s.begin, int64(a.credit.last_end))
	p.publish(from, from, n, n)
	p.publish(max(s.end, from), from+max(s.end-from, 0)/int64(n), n, n)
	return &p
}
