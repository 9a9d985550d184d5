/*
 * oldstart.c - where a program begins, for programs that must run with glibc 2.17.
 *
 * The start file of a new glibc asks for __libc_start_main@GLIBC_2.34. This one
 * calls the old version, which new systems still have. Without a list of
 * initialisers to hand over (there are none in these programs) it is the same.
 */
#if defined(__x86_64__) && !defined(SOFT_SANITIZED)
__asm__(".symver __libc_start_main,__libc_start_main@GLIBC_2.2.5");
int main(int argc, char **argv, char **environment);
extern int __libc_start_main(int (*start)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
                             void (*loader_fini)(void), void *stack_end);

__attribute__((used)) static void begin(long *stack, void (*loader_fini)(void)) {
  __libc_start_main(main, (int)stack[0], (char **)(stack + 1), (void (*)(void))0, (void (*)(void))0, loader_fini, stack);
}

__asm__(".globl _start\n"
        ".type _start,@function\n"
        "_start:\n"
        "  xor %ebp, %ebp\n"
        "  mov %rsp, %rdi\n"
        "  mov %rdx, %rsi\n"
        "  and $-16, %rsp\n"
        "  call begin\n"
        "  hlt\n");
#endif
