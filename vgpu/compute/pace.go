package compute

// pacePoints is how far back the pace is known: 2 s at the shortest period, as in
// the file that processes read.
const pacePoints = 1024

// Point is the card's pace at one time, both in nanoseconds.
type Point struct{ At, Value int64 }

// Pace is the integral of 1/n over time, n being the processes with work on the
// card: the time that a process that always had work got, were turns fair.
// Between points it is linear, behind the last it grows by 1/n.
type Pace struct {
	points   [pacePoints]Point
	count    int
	contexts int
}

// Last is the newest point; zero where there is none.
func (p *Pace) Last() Point {
	if p.count == 0 {
		return Point{}
	}
	return p.points[(p.count-1)%pacePoints]
}

// Contexts is n since the newest point, at least 1.
func (p *Pace) Contexts() int { return max(p.contexts, 1) }

// move appends the point at now. Since the last one n changed from what it was to
// contexts at a moment that nobody saw: half the time is counted at either.
func (p *Pace) move(now int64, contexts int) {
	contexts = max(contexts, 1)
	next := Point{At: now, Value: now}
	if p.count > 0 {
		last := p.Last()
		passed := now - last.At
		next.Value = last.Value + passed/int64(2*p.Contexts()) + passed/int64(2*contexts)
	}
	p.points[p.count%pacePoints] = next
	p.count++
	p.contexts = contexts
}

// At is the pace at some time; before the oldest point it is taken to have been
// the clock's.
func (p *Pace) At(at int64) int64 {
	if p.count == 0 {
		return at
	}
	next := p.Last()
	if at >= next.At {
		return next.Value + (at-next.At)/int64(p.Contexts())
	}
	for back := 2; back <= min(p.count, pacePoints); back++ {
		point := p.points[(p.count-back)%pacePoints]
		if point.At <= at {
			if next.At == point.At {
				return point.Value
			}
			return point.Value + int64(float64(next.Value-point.Value)*float64(at-point.At)/float64(next.At-point.At))
		}
		next = point
	}
	return next.Value - (next.At - at)
}
