package sim

const never = int64(1) << 62

// kernel is what stands in a stream.
type kernel struct {
	left   int64
	sample *sample // nil: nobody wants to know
}

// stream is a queue of kernels that run one after the other.
type stream struct {
	ring    [depth]kernel
	head, n int
	pending []*sample // sampled ones that the process hasn't looked at, oldest first
}

// depth is how many launches a process can have on the card at once.
const depth = 1024

func (s *stream) first() *kernel { return &s.ring[s.head] }

func (s *stream) push(k kernel) {
	s.ring[(s.head+s.n)%depth] = k
	s.n++
}

func (s *stream) pop() {
	s.head = (s.head + 1) % depth
	s.n--
}

// card is the model of a card.
type card struct {
	now        int64
	quantum    int64
	switchCost int64
	tenants    []*tenant
	current    int
	slice      int64 // left of the current turn
	switching  int64 // left of the switch
	runnable   int   // tenants with something queued
}

// next gives the card to the next tenant that has work; false where none has.
func (c *card) next() bool {
	for i := 1; i <= len(c.tenants); i++ {
		at := (c.current + i) % len(c.tenants)
		if c.tenants[at].queued == 0 {
			continue
		}
		if at != c.current {
			c.switching = c.switchCost
			c.current = at
		}
		c.slice = c.quantum
		return true
	}
	return false
}

// advance runs the card up to a time, or to the first moment at which a process
// that waited for the card is to be woken.
func (c *card) advance(to int64) {
	for c.now < to {
		t := c.tenants[c.current]
		if t.queued == 0 || c.slice == 0 {
			if !c.next() {
				c.now = to
				return
			}
			t = c.tenants[c.current]
		}
		if c.switching > 0 {
			d := min(c.switching, to-c.now)
			c.switching -= d
			c.now += d
			continue
		}
		d := to - c.now
		for i := range t.streams {
			s := &t.streams[i]
			if s.n == 0 {
				continue
			}
			k := s.first()
			if k.sample != nil && k.sample.begin < 0 {
				k.sample.begin = c.now
			}
			d = min(d, k.left)
		}
		if c.runnable > 1 {
			d = min(d, c.slice)
			c.slice -= d
		} else {
			c.slice = c.quantum
		}
		c.now += d
		t.busy += d
		for i := range t.streams {
			s := &t.streams[i]
			if s.n == 0 {
				continue
			}
			k := s.first()
			k.left -= d
			if k.left == 0 {
				if k.sample != nil {
					k.sample.end = c.now
				}
				s.pop()
				t.queued--
			}
		}
		if t.queued == 0 {
			c.runnable--
		}
		if t.satisfied() {
			return
		}
	}
}
