package twin

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Bounds of what is read from a file that may hold anything. Drivers of today
// export some 700 names of 20 KiB together.
const (
	maxSymbols  = 1 << 14
	maxStrings  = 4 << 20
	maxName     = 4096
	maxSegments = 256
	maxDynamic  = 4096
	maxFilter   = 1 << 16 // words of a hash table's filter
)

const (
	headerSize  = 64
	segmentSize = 56
	symbolSize  = 24
)

var order = binary.LittleEndian

// Export is a name that a library gives to others.
type Export struct {
	Name string
	Type elf.SymType
	Bind elf.SymBind
	// Size is in bytes, as the library has it.
	Size uint64
	// address is in the library's own space.
	address uint64
}

// Library is a shared library's file as the loader sees it.
type Library struct {
	Machine elf.Machine
	Soname  string
	Needed  []string
	// Exports are what dlsym finds, sorted by name.
	Exports []Export

	symbols []byte
	strings []byte
	hash    hashTable
}

// Read reads a library's file: at most some MiB of it, whatever it claims to
// hold. An error says what is strange about it.
func Read(r io.ReaderAt) (*Library, error) {
	f := file{r: r}
	if err := f.readHeader(); err != nil {
		return nil, err
	}
	l := &Library{Machine: f.machine}
	tags, needed, err := f.readDynamic()
	if err != nil {
		return nil, err
	}
	if tags[elf.DT_SYMENT] != symbolSize {
		return nil, fmt.Errorf("a symbol takes %d bytes, %d expected", tags[elf.DT_SYMENT], symbolSize)
	}
	if n := tags[elf.DT_STRSZ]; n == 0 || n > maxStrings {
		return nil, fmt.Errorf("its names take %d bytes, at most %d expected", n, maxStrings)
	}
	if l.strings, err = f.at(tags[elf.DT_STRTAB], tags[elf.DT_STRSZ]); err != nil {
		return nil, fmt.Errorf("names: %w", err)
	}
	if err := l.readNames(tags, needed); err != nil {
		return nil, err
	}
	var count uint32
	switch {
	case tags[elf.DT_GNU_HASH] != 0: // which the loader prefers
		l.hash, count, err = readGNUHash(&f, tags[elf.DT_GNU_HASH])
	case tags[elf.DT_HASH] != 0:
		l.hash, count, err = readSysVHash(&f, tags[elf.DT_HASH])
	default:
		err = errors.New("it has no hash table of its symbols")
	}
	if err != nil {
		return nil, err
	}
	if l.symbols, err = f.at(tags[elf.DT_SYMTAB], uint64(count)*symbolSize); err != nil {
		return nil, fmt.Errorf("symbols: %w", err)
	}
	if err := l.readExports(); err != nil {
		return nil, err
	}
	return l, f.refuseVersions(tags, l)
}

// readNames takes the library's own name and those that it needs.
func (l *Library) readNames(tags map[elf.DynTag]uint64, needed []uint64) error {
	var err error
	if at, ok := tags[elf.DT_SONAME]; ok {
		if l.Soname, err = text(l.strings, at); err != nil {
			return fmt.Errorf("SONAME: %w", err)
		}
	}
	for _, at := range needed {
		name, err := text(l.strings, at)
		if err != nil {
			return fmt.Errorf("NEEDED: %w", err)
		}
		l.Needed = append(l.Needed, name)
	}
	return nil
}

// readExports lists the symbols that the loader finds by their name.
func (l *Library) readExports() error {
	for i := uint32(1); i < uint32(len(l.symbols)/symbolSize); i++ {
		s := l.symbol(i)
		if !s.visible() {
			continue
		}
		name, err := text(l.strings, uint64(s.name))
		if err != nil {
			return fmt.Errorf("symbol %d: %w", i, err)
		}
		if found, ok := l.find(name); !ok || found != i {
			continue
		}
		l.Exports = append(l.Exports, Export{Name: name, Type: s.kind(), Bind: s.bind(), Size: s.size, address: s.value})
	}
	slices.SortFunc(l.Exports, func(a, b Export) int { return strings.Compare(a.Name, b.Name) })
	return nil
}

// find looks a name up as the loader does, and returns its symbol.
func (l *Library) find(name string) (uint32, bool) {
	if l.hash == nil || name == "" {
		return 0, false
	}
	return l.hash.find(name, func(i uint32) bool {
		if uint64(i+1)*symbolSize > uint64(len(l.symbols)) {
			return false
		}
		s := l.symbol(i)
		return s.visible() && sameText(l.strings, uint64(s.name), name)
	})
}

func (l *Library) symbol(i uint32) symbol { return readSymbol(l.symbols[i*symbolSize:]) }

// symbol is an entry of a symbol table.
type symbol struct {
	name        uint32
	info, other uint8
	section     elf.SectionIndex
	value, size uint64
}

func readSymbol(b []byte) symbol {
	return symbol{
		name: order.Uint32(b), info: b[4], other: b[5], section: elf.SectionIndex(order.Uint16(b[6:])),
		value: order.Uint64(b[8:]), size: order.Uint64(b[16:]),
	}
}

func (s symbol) append(b []byte) []byte {
	b = order.AppendUint32(b, s.name)
	b = append(b, s.info, s.other)
	b = order.AppendUint16(b, uint16(s.section))
	b = order.AppendUint64(b, s.value)
	return order.AppendUint64(b, s.size)
}

func (s symbol) kind() elf.SymType { return elf.ST_TYPE(s.info) }
func (s symbol) bind() elf.SymBind { return elf.ST_BIND(s.info) }

// uniqueBind is STB_GNU_UNIQUE, for which debug/elf has no name.
const uniqueBind = elf.SymBind(10)

// visible is what glibc's dlsym takes for a definition.
func (s symbol) visible() bool {
	if s.section == elf.SHN_UNDEF || s.value == 0 && s.section != elf.SHN_ABS && s.kind() != elf.STT_TLS {
		return false
	}
	switch s.kind() {
	case elf.STT_NOTYPE, elf.STT_OBJECT, elf.STT_FUNC, elf.STT_COMMON, elf.STT_TLS, elf.STT_GNU_IFUNC:
	default:
		return false
	}
	return s.bind() == elf.STB_GLOBAL || s.bind() == elf.STB_WEAK || s.bind() == uniqueBind
}

// text is the string at an offset of a table of strings.
func text(table []byte, at uint64) (string, error) {
	if at >= uint64(len(table)) {
		return "", fmt.Errorf("a name lies at %d, past the %d bytes of names", at, len(table))
	}
	rest := table[at:min(at+maxName, uint64(len(table)))]
	end := bytes.IndexByte(rest, 0)
	if end < 0 {
		return "", fmt.Errorf("a name has no end in %d bytes", len(rest))
	}
	return string(rest[:end]), nil
}

func sameText(table []byte, at uint64, want string) bool {
	n := uint64(len(want))
	return at < uint64(len(table)) && uint64(len(table))-at > n && table[at+n] == 0 && string(table[at:at+n]) == want
}

// file is a library's file, read by the addresses that its parts will have.
type file struct {
	r       io.ReaderAt
	machine elf.Machine
	loads   []segment
	dynamic segment
}

type segment struct {
	address, offset, fileSize, memorySize uint64
}

func (f *file) readHeader() error {
	var h [headerSize]byte
	if err := f.readAt(h[:], 0); err != nil {
		return fmt.Errorf("ELF header: %w", err)
	}
	if string(h[:4]) != elf.ELFMAG || elf.Class(h[4]) != elf.ELFCLASS64 || elf.Data(h[5]) != elf.ELFDATA2LSB {
		return errors.New("it is no 64-bit little-endian ELF file")
	}
	if kind := elf.Type(order.Uint16(h[16:])); kind != elf.ET_DYN {
		return fmt.Errorf("it is of type %s, no shared library", kind)
	}
	f.machine = elf.Machine(order.Uint16(h[18:]))
	at, size, count := order.Uint64(h[32:]), order.Uint16(h[54:]), order.Uint16(h[56:])
	if size != segmentSize || count == 0 || count > maxSegments {
		return fmt.Errorf("it has %d segments of %d bytes each", count, size)
	}
	table := make([]byte, int(count)*segmentSize)
	if err := f.readAt(table, at); err != nil {
		return fmt.Errorf("segments: %w", err)
	}
	for ; len(table) > 0; table = table[segmentSize:] {
		s := segment{
			offset: order.Uint64(table[8:]), address: order.Uint64(table[16:]),
			fileSize: order.Uint64(table[32:]), memorySize: order.Uint64(table[40:]),
		}
		switch elf.ProgType(order.Uint32(table)) {
		case elf.PT_LOAD:
			f.loads = append(f.loads, s)
		case elf.PT_DYNAMIC:
			f.dynamic = s
		}
	}
	if f.dynamic.fileSize == 0 {
		return errors.New("it has no dynamic segment")
	}
	return nil
}

// readDynamic reads what the library tells the loader. Of a tag that comes more
// than once the last one counts, as it does there.
func (f *file) readDynamic() (tags map[elf.DynTag]uint64, needed []uint64, err error) {
	n := min(f.dynamic.fileSize/16, maxDynamic)
	b, err := f.at(f.dynamic.address, n*16)
	if err != nil {
		return nil, nil, fmt.Errorf("dynamic segment: %w", err)
	}
	tags = map[elf.DynTag]uint64{}
	for ; len(b) >= 16; b = b[16:] {
		tag, value := elf.DynTag(order.Uint64(b)), order.Uint64(b[8:])
		switch tag {
		case elf.DT_NULL:
			return tags, needed, nil
		case elf.DT_NEEDED:
			needed = append(needed, value)
		}
		tags[tag] = value
	}
	return tags, needed, nil
}

// refuseVersions is for exports with versions, which no driver has had so far.
func (f *file) refuseVersions(tags map[elf.DynTag]uint64, l *Library) error {
	at, ok := tags[elf.DT_VERSYM]
	if !ok {
		return nil
	}
	versions, err := f.at(at, uint64(len(l.symbols)/symbolSize)*2)
	if err != nil {
		return fmt.Errorf("versions: %w", err)
	}
	for _, e := range l.Exports {
		i, _ := l.find(e.Name)
		if v := order.Uint16(versions[i*2:]); v > 1 {
			return fmt.Errorf("%s has a version (%d), which twins don't carry yet", e.Name, v&0x7fff)
		}
	}
	return nil
}

// at reads what will lie at an address.
func (f *file) at(address, n uint64) ([]byte, error) {
	b, err := f.upTo(address, n)
	if err == nil && uint64(len(b)) < n {
		err = fmt.Errorf("%d bytes at %#x aren't in the file", n, address)
	}
	return b, err
}

// upTo reads what will lie at an address and after it, at most n bytes.
func (f *file) upTo(address, n uint64) ([]byte, error) {
	for _, s := range f.loads {
		if address < s.address || address-s.address >= s.fileSize {
			continue
		}
		skip := address - s.address
		b := make([]byte, min(n, s.fileSize-skip, maxStrings))
		return b, f.readAt(b, s.offset+skip)
	}
	return nil, fmt.Errorf("address %#x isn't in the file", address)
}

func (f *file) readAt(b []byte, offset uint64) error {
	if int64(offset) < 0 {
		return fmt.Errorf("offset %#x is past the end of the file", offset)
	}
	if n, err := f.r.ReadAt(b, int64(offset)); n < len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	return nil
}
