package twin

import "debug/elf"

// export is a symbol of a fakeDriver.
type export struct {
	name          string
	kind          elf.SymType
	bind          elf.SymBind
	address, size uint64
}

// fakeDriver writes the file of a library that doesn't exist: what the loader
// reads of one, and nothing else.
type fakeDriver struct {
	exports []export
	soname  string      // "" means libcuda.so.1
	machine elf.Machine // 0 means EM_X86_64
	sysv    bool        // DT_HASH instead of DT_GNU_HASH
	version uint16      // of each export; 0 means that there are none
}

func (d fakeDriver) file() []byte {
	if d.soname == "" {
		d.soname = "libcuda.so.1"
	}
	if d.machine == 0 {
		d.machine = elf.EM_X86_64
	}
	exports := append([]export{}, d.exports...)
	sortForGNU(exports, func(e export) string { return e.name })
	strings, symbols, versions := []byte{0}, make([]byte, symbolSize), make([]byte, 2)
	var names []string
	for _, e := range exports {
		s := symbol{name: uint32(len(strings)), info: elf.ST_INFO(e.bind, e.kind), section: 1, value: e.address, size: e.size}
		symbols = s.append(symbols)
		strings = append(append(strings, e.name...), 0)
		versions = order.AppendUint16(versions, d.version)
		names = append(names, e.name)
	}
	soname := uint64(len(strings))
	strings = append(append(strings, d.soname...), 0)
	hash, hashTag := gnuHash(names, 1), elf.DT_GNU_HASH
	if d.sysv {
		hash, hashTag = sysvHash(names, 1), elf.DT_HASH
	}

	out := make([]byte, headerSize+2*segmentSize)
	put := func(b []byte) uint64 {
		for len(out)%8 != 0 {
			out = append(out, 0)
		}
		at := uint64(len(out))
		out = append(out, b...)
		return at
	}
	tags := []struct {
		tag   elf.DynTag
		value uint64
	}{
		{elf.DT_SONAME, soname}, {elf.DT_SYMTAB, put(symbols)}, {elf.DT_SYMENT, symbolSize},
		{elf.DT_STRTAB, put(strings)}, {elf.DT_STRSZ, uint64(len(strings))}, {hashTag, put(hash)},
	}
	if d.version != 0 {
		tags = append(tags, struct {
			tag   elf.DynTag
			value uint64
		}{elf.DT_VERSYM, put(versions)})
	}
	var dynamic []byte
	for _, t := range tags {
		dynamic = order.AppendUint64(order.AppendUint64(dynamic, uint64(t.tag)), t.value)
	}
	dynamic = append(dynamic, make([]byte, 16)...)
	at := put(dynamic)

	copy(out, elf.ELFMAG)
	out[4], out[5], out[6] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	order.PutUint16(out[16:], uint16(elf.ET_DYN))
	order.PutUint16(out[18:], uint16(d.machine))
	order.PutUint64(out[32:], headerSize)
	order.PutUint16(out[54:], segmentSize)
	order.PutUint16(out[56:], 2)
	segment := func(i int, kind elf.ProgType, at, size uint64) {
		b := out[headerSize+i*segmentSize:]
		order.PutUint32(b, uint32(kind))
		order.PutUint64(b[8:], at)
		order.PutUint64(b[16:], at)
		order.PutUint64(b[32:], size)
		order.PutUint64(b[40:], size)
	}
	segment(0, elf.PT_LOAD, 0, uint64(len(out)))
	segment(1, elf.PT_DYNAMIC, at, uint64(len(dynamic)))
	return out
}
