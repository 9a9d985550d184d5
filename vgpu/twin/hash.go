package twin

import (
	"errors"
	"fmt"
	"slices"
)

// hashTable finds a symbol by its name, as the loader does.
type hashTable interface {
	// find calls is with each symbol that may have the name, until it says yes.
	find(name string, is func(uint32) bool) (uint32, bool)
}

func hashGNU(name string) uint32 {
	h := uint32(5381)
	for i := range len(name) {
		h = h*33 + uint32(name[i])
	}
	return h
}

func hashSysV(name string) uint32 {
	var h uint32
	for i := range len(name) {
		h = h<<4 + uint32(name[i])
		h ^= h >> 24 & 0xf0
		h &= 0x0fffffff
	}
	return h
}

// gnuTable is a table of DT_GNU_HASH.
type gnuTable struct {
	first, shift   uint32
	filter         []uint64
	buckets, chain []uint32
}

// readGNUHash reads a table and says how many symbols there must be for it.
func readGNUHash(f *file, at uint64) (hashTable, uint32, error) {
	head, err := f.at(at, 16)
	if err != nil {
		return nil, 0, fmt.Errorf("hash table: %w", err)
	}
	count, words := order.Uint32(head), order.Uint32(head[8:])
	t := gnuTable{first: order.Uint32(head[4:]), shift: order.Uint32(head[12:])}
	if count == 0 || count > maxSymbols || words == 0 || words > maxFilter || words&(words-1) != 0 || t.first > maxSymbols || t.shift > 31 {
		return nil, 0, fmt.Errorf("its hash table has %d buckets, a filter of %d words shifted by %d, and begins at symbol %d", count, words, t.shift, t.first)
	}
	filter, err := f.at(at+16, uint64(words)*8)
	if err != nil {
		return nil, 0, fmt.Errorf("hash table: %w", err)
	}
	for ; len(filter) > 0; filter = filter[8:] {
		t.filter = append(t.filter, order.Uint64(filter))
	}
	at += 16 + uint64(words)*8
	if t.buckets, err = words32(f.at(at, uint64(count)*4)); err != nil {
		return nil, 0, fmt.Errorf("hash table: %w", err)
	}
	last := uint32(0)
	for _, b := range t.buckets {
		if b != 0 && b < t.first || b >= maxSymbols {
			return nil, 0, fmt.Errorf("its hash table leads to symbol %d", b)
		}
		last = max(last, b)
	}
	if last == 0 {
		return t, t.first, nil // nothing is found by name
	}
	// The chain ends where the last bucket's list does; the table doesn't say.
	at += uint64(count) * 4
	chain, err := words32(f.upTo(at, maxSymbols*4))
	if err != nil {
		return nil, 0, fmt.Errorf("hash table: %w", err)
	}
	for i := last - t.first; ; i++ {
		if i >= uint32(len(chain)) {
			return nil, 0, errors.New("its hash table has no end")
		}
		if chain[i]&1 != 0 {
			t.chain = chain[:i+1]
			return t, t.first + i + 1, nil
		}
	}
}

func (t gnuTable) find(name string, is func(uint32) bool) (uint32, bool) {
	h := hashGNU(name)
	word := t.filter[h/64&uint32(len(t.filter)-1)]
	if word>>(h%64)&1 == 0 || word>>(h>>t.shift%64)&1 == 0 {
		return 0, false
	}
	i := t.buckets[h%uint32(len(t.buckets))]
	if i == 0 {
		return 0, false
	}
	for ; i-t.first < uint32(len(t.chain)); i++ {
		c := t.chain[i-t.first]
		if (c^h)>>1 == 0 && is(i) {
			return i, true
		}
		if c&1 != 0 {
			break
		}
	}
	return 0, false
}

// sysvTable is a table of DT_HASH.
type sysvTable struct {
	buckets, chain []uint32
}

func readSysVHash(f *file, at uint64) (hashTable, uint32, error) {
	head, err := words32(f.at(at, 8))
	if err != nil {
		return nil, 0, fmt.Errorf("hash table: %w", err)
	}
	count, symbols := head[0], head[1]
	if count == 0 || count > maxSymbols || symbols > maxSymbols {
		return nil, 0, fmt.Errorf("its hash table has %d buckets for %d symbols", count, symbols)
	}
	all, err := words32(f.at(at+8, (uint64(count)+uint64(symbols))*4))
	if err != nil {
		return nil, 0, fmt.Errorf("hash table: %w", err)
	}
	return sysvTable{all[:count], all[count:]}, symbols, nil
}

func (t sysvTable) find(name string, is func(uint32) bool) (uint32, bool) {
	i := t.buckets[hashSysV(name)%uint32(len(t.buckets))]
	// A list that leads back into itself would have no end.
	for range t.chain {
		if i == 0 || i >= uint32(len(t.chain)) {
			break
		}
		if is(i) {
			return i, true
		}
		i = t.chain[i]
	}
	return 0, false
}

func words32(b []byte, err error) ([]uint32, error) {
	w := make([]uint32, 0, len(b)/4)
	for ; len(b) >= 4; b = b[4:] {
		w = append(w, order.Uint32(b))
	}
	return w, err
}

// buckets is how many a table of n names gets: few names share one, and most
// that aren't there meet an empty one.
func buckets(n int) uint32 { return uint32(n)*2 | 1 }

// sortForGNU brings names into the order in which a table of DT_GNU_HASH has
// them: those of a bucket side by side.
func sortForGNU[T any](list []T, name func(T) string) {
	n := buckets(len(list))
	slices.SortStableFunc(list, func(a, b T) int {
		return int(hashGNU(name(a))%n) - int(hashGNU(name(b))%n)
	})
}

// gnuHash makes a table of DT_GNU_HASH of names in the order of sortForGNU, the
// first of which is symbol first.
func gnuHash(names []string, first uint32) []byte {
	const shift = 6
	n, words := buckets(len(names)), uint32(1)
	for words*8 < uint32(len(names)) { // at least 8 bits for each name
		words *= 2
	}
	filter, heads, chain := make([]uint64, words), make([]uint32, n), make([]uint32, len(names))
	for i, name := range names {
		h := hashGNU(name)
		filter[h/64&(words-1)] |= 1<<(h%64) | 1<<(h>>shift%64)
		if heads[h%n] == 0 {
			heads[h%n] = first + uint32(i)
		}
		chain[i] = h &^ 1
		if i+1 == len(names) || hashGNU(names[i+1])%n != h%n {
			chain[i] |= 1
		}
	}
	var b []byte
	for _, w := range []uint32{n, first, words, shift} {
		b = order.AppendUint32(b, w)
	}
	for _, w := range filter {
		b = order.AppendUint64(b, w)
	}
	for _, w := range append(heads, chain...) {
		b = order.AppendUint32(b, w)
	}
	return b
}

// sysvHash makes a table of DT_HASH of the same.
func sysvHash(names []string, first uint32) []byte {
	n := buckets(len(names))
	heads, chain := make([]uint32, n), make([]uint32, int(first)+len(names))
	for i, name := range names {
		h, s := hashSysV(name)%n, first+uint32(i)
		heads[h], chain[s] = s, heads[h]
	}
	b := order.AppendUint32(nil, n)
	b = order.AppendUint32(b, uint32(len(chain)))
	for _, w := range append(heads, chain...) {
		b = order.AppendUint32(b, w)
	}
	return b
}
