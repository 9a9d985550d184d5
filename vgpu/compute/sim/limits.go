package sim

// Limit is a case that no division from user space gets right.
type Limit struct {
	Name    string
	Members []Member
}

// Limits are the cases that can't be met, for the record.
func Limits() []Limit {
	steady := func(share uint32, mean int64) Member {
		return Member{SharePPM: share, Program: Program{Means: []int64{mean}, Streams: 1}}
	}
	long := func(size int) Limit {
		share := uint32(980_000 / (2*size - 1)) // half of what each other has
		l := Limit{Name: map[int]string{2: "a 10 s kernel beside one", 4: "a 10 s kernel beside three", 8: "a 10 s kernel beside seven"}[size]}
		l.Members = append(l.Members, steady(share, 10*Second))
		for range size - 1 {
			l.Members = append(l.Members, steady(2*share, Millisecond))
		}
		return l
	}
	sync := steady(490_000, 10*Microsecond)
	sync.Program.SyncEach = true
	return []Limit{
		long(2), long(4), long(8),
		{Name: "10 µs kernels, each waited for, beside one", Members: []Member{sync, steady(490_000, Millisecond)}},
		{Name: "10 µs kernels, each waited for, alone", Members: []Member{sync}},
		{Name: "100 ms kernels at 5 %", Members: []Member{steady(50_000, 100*Millisecond), steady(930_000, Millisecond)}},
	}
}
