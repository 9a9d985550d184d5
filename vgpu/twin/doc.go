// Package twin makes the front of a driver's library its twin: a file whose
// symbol table has what the installed driver exports, name by name and type by
// type, and nothing else. It reads and writes bytes, and touches no file.
//
// The front (vgpu/lib) exports its hooks, and depends on the driver, which so
// stands right behind it in every search of the loader. That is enough for
// dlsym; it isn't for the linker, which takes a library's symbol table for all
// there is, and it leaves hooks in sight that this driver doesn't have.
//
// A symbol table is read in two ways. The linker reads it from end to end. The
// loader finds names through its hash table only. So the twin lists every
// export of the driver, and hashes the hooks among them: the linker finds all
// names, while the loader finds a hook in the twin, and goes on to the driver
// for all others, whose own functions and variables it binds. No call takes a
// detour, a function has one address however it was asked for, and variables
// are the driver's own.
//
// Start reading at Make.
package twin
