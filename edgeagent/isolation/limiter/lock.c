/* Locks made of a futex word: between threads here, between processes in account.c.
 *
 * No pthread mutex: up to glibc 2.33 that would drag libpthread into every process of the container.
 */
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "limiter.h"

void futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t timeout_ns) {
    struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, timeout_ns < 0 ? NULL : &timeout, NULL, 0);
}

void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0); }

enum { FREE, TAKEN, WANTED };

void lock_take(struct lock *lock) {
    uint32_t seen = FREE;
    if (LIKELY(atomic_compare_exchange_strong_explicit(&lock->word, &seen, TAKEN, memory_order_acquire,
                                                       memory_order_relaxed)))
        return;
    while (atomic_exchange_explicit(&lock->word, WANTED, memory_order_acquire) != FREE)
        futex_wait(&lock->word, WANTED, -1);
}

void lock_give(struct lock *lock) {
    if (UNLIKELY(atomic_exchange_explicit(&lock->word, FREE, memory_order_release) == WANTED))
        futex_wake(&lock->word);
}
