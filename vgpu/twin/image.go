package twin

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
)

// maxSections bounds the sections of a front.
const maxSections = 1024

const sectionSize = 64

// image is a front with the parts that change in it.
type image struct {
	front   []byte
	library *Library

	symbols, strings, versions, gnuHash, sysvHash, dynamic *section
	room, behind, data                                     *section
	// buildID, linkSymbols and linkNames are nil where they were stripped.
	buildID, linkSymbols, linkNames *section

	// The symbol table has count symbols. The first firstOwn are the sections'
	// and imports, to which relocations point. Hooks begin at firstHook.
	firstOwn, firstHook, count uint32
	// sysv is the second hash table, nil if there is none.
	sysv *Library
}

// section is an entry of the section table.
type section struct {
	index                          uint32
	name                           string
	kind                           elf.SectionType
	flags                          elf.SectionFlag
	address, offset, size, entSize uint64
	nameAt, link, info             uint32
	align                          uint64
	header                         uint64 // where the entry is in the file
}

func (s *section) write(out []byte) {
	b := out[s.header:][:sectionSize]
	order.PutUint64(b[16:], s.address)
	order.PutUint64(b[24:], s.offset)
	order.PutUint64(b[32:], s.size)
	order.PutUint64(b[48:], s.align)
}

// body is a section's content.
func (im *image) body(s *section) []byte { return im.front[s.offset:][:s.size] }

// readImage reads a front, or a twin.
func readImage(front []byte) (*image, error) {
	library, err := Read(bytes.NewReader(front))
	if err != nil {
		return nil, err
	}
	im := &image{front: front, library: library}
	sections, err := readSections(front)
	if err != nil {
		return nil, err
	}
	for i := range sections {
		s := &sections[i]
		switch {
		case s.kind == elf.SHT_DYNSYM:
			im.symbols = s
		case s.kind == elf.SHT_GNU_HASH:
			im.gnuHash = s
		case s.kind == elf.SHT_HASH:
			im.sysvHash = s
		case s.kind == elf.SHT_GNU_VERSYM:
			im.versions = s
		case s.kind == elf.SHT_DYNAMIC:
			im.dynamic = s
		case s.kind == elf.SHT_SYMTAB:
			im.linkSymbols = s
		case s.name == ".note.gnu.build-id" && s.kind == elf.SHT_NOTE:
			im.buildID = s
		case s.name == roomSection && s.kind == elf.SHT_PROGBITS:
			im.room = s
		case s.name == behindSection && s.kind == elf.SHT_PROGBITS && s.flags&elf.SHF_EXECINSTR != 0:
			im.behind = s
		case s.name == dataSection && s.flags&elf.SHF_WRITE != 0:
			im.data = s
		}
	}
	names := func(symbols *section) *section {
		if symbols == nil || symbols.link >= uint32(len(sections)) || sections[symbols.link].kind != elf.SHT_STRTAB {
			return nil
		}
		return &sections[symbols.link]
	}
	im.strings, im.linkNames = names(im.symbols), names(im.linkSymbols)
	for _, must := range []struct {
		section *section
		name    string
	}{
		{im.symbols, ".dynsym"}, {im.strings, ".dynstr"}, {im.gnuHash, ".gnu.hash"}, {im.versions, ".gnu.version"},
		{im.dynamic, ".dynamic"}, {im.room, roomSection}, {im.behind, behindSection}, {im.data, dataSection},
	} {
		if must.section == nil {
			return nil, fmt.Errorf("it has no %s", must.name)
		}
	}
	return im, im.readSymbols(sections)
}

// readSymbols finds out where the hooks begin, and makes sure that nothing
// refers to them by number.
func (im *image) readSymbols(sections []section) error {
	im.count = uint32(min(im.symbols.size/symbolSize, maxSymbols))
	if im.versions.size < uint64(im.count)*2 || uint64(im.count)*symbolSize < uint64(len(im.library.symbols)) {
		return fmt.Errorf("it has %d symbols and %d bytes of versions", im.count, im.versions.size)
	}
	t, ok := im.library.hash.(gnuTable)
	if !ok || t.first > im.count {
		return errors.New("its hash table isn't that of its symbols")
	}
	im.firstHook = t.first
	for im.firstOwn = 1; im.firstOwn < im.firstHook; im.firstOwn++ {
		s := readSymbol(im.body(im.symbols)[im.firstOwn*symbolSize:])
		if s.section != elf.SHN_UNDEF && s.bind() != elf.STB_LOCAL {
			break
		}
	}
	for i := range sections {
		s := &sections[i]
		if s.kind != elf.SHT_RELA || s.flags&elf.SHF_ALLOC == 0 {
			continue
		}
		for b := im.body(s); len(b) >= 24; b = b[24:] {
			if to := elf.R_SYM64(order.Uint64(b[8:])); to >= im.firstOwn {
				return fmt.Errorf("a relocation in %s refers to its own symbol %d", s.name, to)
			}
		}
	}
	if im.sysvHash == nil {
		return nil
	}
	f := file{r: bytes.NewReader(im.front)}
	if err := f.readHeader(); err != nil {
		return err
	}
	table, _, err := readSysVHash(&f, im.sysvHash.address)
	if err != nil {
		return err
	}
	second := *im.library
	second.hash, second.symbols = table, im.body(im.symbols)
	im.sysv = &second
	return nil
}

func readSections(b []byte) ([]section, error) {
	at, size := order.Uint64(b[40:]), order.Uint16(b[58:])
	count, names := uint64(order.Uint16(b[60:])), uint64(order.Uint16(b[62:]))
	if size != sectionSize || count == 0 || count > maxSections || names >= count ||
		at > uint64(len(b)) || count*sectionSize > uint64(len(b))-at {
		return nil, fmt.Errorf("it has %d sections of %d bytes each", count, size)
	}
	list := make([]section, count)
	for i := range list {
		h := at + uint64(i)*sectionSize
		e := b[h:]
		s := section{
			index: uint32(i), header: h,
			nameAt: order.Uint32(e), kind: elf.SectionType(order.Uint32(e[4:])), flags: elf.SectionFlag(order.Uint64(e[8:])),
			address: order.Uint64(e[16:]), offset: order.Uint64(e[24:]), size: order.Uint64(e[32:]),
			link: order.Uint32(e[40:]), info: order.Uint32(e[44:]), align: order.Uint64(e[48:]), entSize: order.Uint64(e[56:]),
		}
		if s.kind != elf.SHT_NOBITS && s.kind != elf.SHT_NULL && (s.offset > uint64(len(b)) || s.size > uint64(len(b))-s.offset) {
			return nil, fmt.Errorf("section %d isn't in the file", i)
		}
		list[i] = s
	}
	table := list[names]
	if table.kind == elf.SHT_NOBITS || table.kind == elf.SHT_NULL {
		return nil, errors.New("its sections have no names")
	}
	for i := range list {
		name, err := text(b[table.offset:][:table.size], uint64(list[i].nameAt))
		if err != nil {
			return nil, fmt.Errorf("section %d: %w", i, err)
		}
		list[i].name = name
	}
	return list, nil
}
