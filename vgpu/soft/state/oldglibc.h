/*
 * oldglibc.h - keeps what we build loadable with glibc 2.17, as drivers are.
 *
 * glibc 2.34 moved these functions into libc.so under new versions. Their old
 * versions are still there; asking for those by name makes a library built on
 * a new system load on an old one. They are found in libdl and libpthread
 * there, so both are linked by their file names.
 */
#ifndef SOFT_OLDGLIBC_H
#define SOFT_OLDGLIBC_H

#if defined(__x86_64__) && defined(__linux__) && !defined(SOFT_SANITIZED)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlclose,dlclose@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
__asm__(".symver dlinfo,dlinfo@GLIBC_2.3.3");
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join,pthread_join@GLIBC_2.2.5");
#endif

#endif
