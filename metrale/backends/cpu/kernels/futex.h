/* futex.h: the two waits every native waiting loop is made of: a pause and a futex (Linux). */
#ifndef METRALE_FUTEX_H
#define METRALE_FUTEX_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline void mt_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield" ::: "memory");
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static inline int64_t mt_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Sleep while *word == seen, until a wake whose mask meets `mask`, or until `deadline_ns` (monotonic; 0: no deadline). */
static inline void mt_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint32_t mask, int64_t deadline_ns) {
    struct timespec until = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG, seen, deadline_ns ? &until : NULL, NULL, mask);
}

static inline void mt_futex_wake(_Atomic uint32_t *word, int count, uint32_t mask) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET | FUTEX_PRIVATE_FLAG, count, NULL, NULL, mask);
}

#endif
