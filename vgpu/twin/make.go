package twin

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"slices"
)

// Twin is a front made for one driver's library.
type Twin struct {
	// File is the library.
	File []byte
	// Hooks are the exports that the front answers itself, Behind those that the
	// driver does, Absent the hooks that this driver doesn't have; all sorted.
	Hooks, Behind, Absent []string
}

// Sections that vgpu/lib/src/room.c leaves to the twin.
const (
	roomSection   = ".carve.room"
	behindSection = ".carve.behind"
	dataSection   = ".carve.data"
)

// behindSize is how far apart the symbols of functions are.
const behindSize = 4

// dataAlignment is kept of the driver's variables: the linker takes alignments
// out of addresses.
const dataAlignment = 64

// Make makes the twin of a driver's library out of its front, and looks the
// whole of it up again, as the loader will. An error says what is strange about
// the driver's library, or that it isn't the front's.
func Make(front []byte, driver *Library) (*Twin, error) {
	im, err := readImage(front)
	if err != nil {
		return nil, fmt.Errorf("read front: %w", err)
	}
	if im.firstOwn != im.firstHook {
		return nil, errors.New("read front: it is a twin already")
	}
	if len(driver.Exports) == 0 {
		return nil, errors.New("make twin: the driver's library exports nothing")
	}
	if driver.Machine != im.library.Machine || driver.Soname != im.library.Soname {
		return nil, fmt.Errorf("make twin: the driver's library is %q for %s, the front %q for %s",
			driver.Soname, driver.Machine, im.library.Soname, im.library.Machine)
	}
	t := &Twin{}
	hooked, behind, err := im.divide(driver, t)
	if err != nil {
		return nil, fmt.Errorf("make twin: %w", err)
	}
	if t.File, err = im.write(hooked, behind); err != nil {
		return nil, fmt.Errorf("make twin: %w", err)
	}
	if err := check(t, driver, im.library); err != nil {
		return nil, fmt.Errorf("check twin: %w", err)
	}
	return t, nil
}

// entry is a symbol to be written, with its name.
type entry struct {
	symbol
	text string
}

// divide tells the driver's exports apart: those that the front hooks, in the
// order of the hash table, and the others.
func (im *image) divide(driver *Library, t *Twin) (hooked, behind []entry, err error) {
	hooks := map[string]Export{}
	for _, e := range im.library.Exports {
		hooks[e.Name] = e
	}
	functions, variables := &area{section: im.behind}, &area{section: im.data}
	for _, e := range driver.Exports {
		if h, ok := hooks[e.Name]; ok {
			if e.Type != h.Type {
				return nil, nil, fmt.Errorf("%s is a %s in the driver's library, a %s in the front", e.Name, e.Type, h.Type)
			}
			i, _ := im.library.find(e.Name)
			s := im.library.symbol(i)
			s.info = elf.ST_INFO(e.Bind, e.Type)
			hooked = append(hooked, entry{s, e.Name})
			t.Hooks = append(t.Hooks, e.Name)
			delete(hooks, e.Name)
			continue
		}
		s := symbol{info: elf.ST_INFO(e.Bind, e.Type)}
		switch e.Type {
		case elf.STT_FUNC, elf.STT_NOTYPE, elf.STT_GNU_IFUNC:
			err = functions.place(&s, behindSize, behindSize, 0)
		case elf.STT_OBJECT, elf.STT_COMMON:
			err = variables.place(&s, e.Size, dataAlignment, e.address)
		default:
			err = fmt.Errorf("it is a %s, which twins don't carry", e.Type)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", e.Name, err)
		}
		behind = append(behind, entry{s, e.Name})
		t.Behind = append(t.Behind, e.Name)
	}
	if len(hooked) == 0 && len(hooks) > 0 {
		return nil, nil, errors.New("the driver's library has none of the functions that the front hooks")
	}
	for name := range hooks {
		t.Absent = append(t.Absent, name)
	}
	slices.Sort(t.Absent)
	sortForGNU(hooked, func(e entry) string { return e.text })
	return hooked, behind, nil
}

// area gives out addresses of a section.
type area struct {
	section *section
	used    uint64
}

// place gives a symbol of a size the next address that is aligned as another
// address is.
func (a *area) place(s *symbol, size, alignment, as uint64) error {
	skip := (as - a.section.address - a.used) % alignment
	if room := a.section.size - a.used; skip > room || size > room-skip {
		return fmt.Errorf("the front has no room left in %s (%d bytes)", a.section.name, a.section.size)
	}
	a.used += skip
	s.section, s.value, s.size = elf.SectionIndex(a.section.index), a.section.address+a.used, size
	a.used = min(a.used+max(size, 1), a.section.size) // one that takes no byte has an address of its own, too
	return nil
}

// write writes the twin: the front with symbols, names and hash tables of its
// own in the room that was left for them.
func (im *image) write(hooked, behind []entry) ([]byte, error) {
	symbols := slices.Clone(im.library.symbols[:im.firstHook*symbolSize])
	versions := slices.Clone(im.body(im.versions)[:im.firstHook*2])
	strings := slices.Clone(im.body(im.strings))
	for _, e := range append(slices.Clone(behind), hooked...) {
		e.name = uint32(len(strings))
		strings = append(append(strings, e.text...), 0)
		symbols = e.append(symbols)
		versions = order.AppendUint16(versions, 1) // global, of no version
	}
	names := make([]string, len(hooked))
	for i, e := range hooked {
		names[i] = e.text
	}
	first := im.firstHook + uint32(len(behind))

	out := slices.Clone(im.front)
	room := roomWriter{out: out, section: *im.room}
	parts := []struct {
		old     *section
		content []byte
		tags    []elf.DynTag
	}{
		{im.symbols, symbols, []elf.DynTag{elf.DT_SYMTAB}},
		{im.gnuHash, gnuHash(names, first), []elf.DynTag{elf.DT_GNU_HASH}},
		{im.sysvHash, sysvHash(names, first), []elf.DynTag{elf.DT_HASH}},
		{im.versions, versions, []elf.DynTag{elf.DT_VERSYM}},
		{im.strings, strings, []elf.DynTag{elf.DT_STRTAB}},
	}
	for _, p := range parts {
		if p.old == nil {
			continue
		}
		if p.old.index == 0 || p.old.size > uint64(len(out)) {
			return nil, errors.New("the front's sections are damaged")
		}
		clear(out[p.old.offset:][:p.old.size])
		address, err := room.put(p.old, p.content)
		if err != nil {
			return nil, err
		}
		for _, tag := range p.tags {
			if err := im.setDynamic(out, tag, address); err != nil {
				return nil, err
			}
		}
		im.moveSymbols(out, p.old.index, address)
	}
	if err := im.setDynamic(out, elf.DT_STRSZ, uint64(len(strings))); err != nil {
		return nil, err
	}
	room.section.write(out) // what is left of it
	im.moveSymbols(out, room.section.index, room.section.address)
	im.hideAbsent(out, names)
	im.setBuildID(out)
	return out, nil
}

// roomWriter gives parts of the room away, from its beginning.
type roomWriter struct {
	out     []byte
	section section
}

// put writes content and lets a section be there.
func (r *roomWriter) put(old *section, content []byte) (address uint64, err error) {
	room := &r.section
	skip := -room.address & 7
	if skip > room.size || uint64(len(content)) > room.size-skip {
		return 0, fmt.Errorf("the front has no room left for %s (%d bytes)", old.name, len(content))
	}
	moved := *old
	moved.address, moved.offset, moved.size = room.address+skip, room.offset+skip, uint64(len(content))
	copy(r.out[moved.offset:], content)
	moved.write(r.out)
	used := skip + moved.size
	room.address, room.offset, room.size = room.address+used, room.offset+used, room.size-used
	room.align = 1
	return moved.address, nil
}

// setDynamic changes what the loader is told.
func (im *image) setDynamic(out []byte, tag elf.DynTag, value uint64) error {
	b := out[im.dynamic.offset:][:im.dynamic.size]
	for ; len(b) >= 16; b = b[16:] {
		switch elf.DynTag(order.Uint64(b)) {
		case tag:
			order.PutUint64(b[8:], value)
			return nil
		case elf.DT_NULL:
			return fmt.Errorf("the front has no %s", tag)
		}
	}
	return fmt.Errorf("the front has no %s", tag)
}

// moveSymbols keeps the debugger's symbols of a section, and the marks of the
// kind of data that is there (aarch64's), in it.
func (im *image) moveSymbols(out []byte, index uint32, address uint64) {
	im.eachLinkSymbol(out, func(s symbol, b []byte) {
		if uint32(s.section) == index && (s.kind() == elf.STT_SECTION || s.value < address) {
			order.PutUint64(b[8:], address)
		}
	})
}

// hideAbsent marks in the debugger's symbols what isn't exported any more.
func (im *image) hideAbsent(out []byte, names []string) {
	if im.linkNames == nil {
		return
	}
	table := im.body(im.linkNames)
	im.eachLinkSymbol(out, func(s symbol, b []byte) {
		if s.bind() == elf.STB_LOCAL || s.section == elf.SHN_UNDEF {
			return
		}
		if name, err := text(table, uint64(s.name)); err == nil && !slices.Contains(names, name) {
			b[5] = b[5]&^3 | byte(elf.STV_HIDDEN)
		}
	})
}

func (im *image) eachLinkSymbol(out []byte, visit func(s symbol, b []byte)) {
	if im.linkSymbols == nil {
		return
	}
	b := out[im.linkSymbols.offset:][:im.linkSymbols.size]
	for ; len(b) >= symbolSize; b = b[symbolSize:] {
		visit(readSymbol(b), b[:symbolSize])
	}
}

// setBuildID gives the file an identity of its own, made from its content.
func (im *image) setBuildID(out []byte) {
	if im.buildID == nil || im.buildID.size <= 16 {
		return
	}
	id := out[im.buildID.offset:][16:im.buildID.size]
	clear(id)
	sum := sha256.Sum256(out)
	copy(id, sum[:])
}

// check looks all names of a twin up as the loader and the linker do.
func check(t *Twin, driver, front *Library) error {
	made, err := Read(bytes.NewReader(t.File))
	if err != nil {
		return err
	}
	if made.Soname != front.Soname || !slices.Equal(made.Needed, front.Needed) {
		return fmt.Errorf("it is %q and needs %q", made.Soname, made.Needed)
	}
	im, err := readImage(t.File)
	if err != nil {
		return err
	}
	listed := map[string]symbol{}
	for i := im.firstOwn; i < im.count; i++ {
		s := readSymbol(im.body(im.symbols)[i*symbolSize:])
		name, err := text(im.body(im.strings), uint64(s.name))
		if err != nil {
			return err
		}
		if _, twice := listed[name]; twice {
			return fmt.Errorf("%s is there twice", name)
		}
		listed[name] = s
	}
	for _, e := range driver.Exports {
		s, ok := listed[e.Name]
		if !ok || s.kind() != e.Type || s.bind() != e.Bind {
			return fmt.Errorf("%s isn't listed as the %s that it is", e.Name, e.Type)
		}
		if _, ok := driver.find(e.Name); !ok {
			return fmt.Errorf("the driver's library has no %s", e.Name)
		}
		_, hashed := made.find(e.Name)
		if hook := slices.Contains(t.Hooks, e.Name); hashed != hook {
			return fmt.Errorf("%s is found in the twin: %v, expected: %v", e.Name, hashed, hook)
		}
		if im.sysv != nil {
			if _, found := im.sysv.find(e.Name); found != hashed {
				return fmt.Errorf("%s is found in one hash table and not in the other", e.Name)
			}
		}
		delete(listed, e.Name)
	}
	for name := range listed {
		return fmt.Errorf("it lists %s, which the driver's library doesn't have", name)
	}
	return nil
}
