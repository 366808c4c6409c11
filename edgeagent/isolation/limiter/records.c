/* What each handle of this process costs: one open-addressing hash table, grown by doubling.
 *
 * Memory comes from mmap, so that a program with its own malloc is left alone.
 */
#include <string.h>
#include <sys/mman.h>

#include "limiter.h"

#define FIRST_CAPACITY 1024u

static struct lock table_lock;
static struct record *table;
static size_t capacity, used;

static size_t home_of(uint32_t kind, uint64_t key, size_t size) {
    uint64_t hash = (key ^ ((uint64_t)kind << 56)) * UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(hash >> 20) & (size - 1);
}

/* Where the record is, or the empty place where it would go. */
static size_t place_of(const struct record *in, size_t size, uint32_t kind, uint64_t key) {
    size_t i = home_of(kind, key, size);
    while (in[i].kind != RECORD_NONE && (in[i].kind != kind || in[i].key != key))
        i = (i + 1) & (size - 1);
    return i;
}

static bool grow(void) {
    size_t larger = capacity == 0 ? FIRST_CAPACITY : capacity * 2;
    struct record *fresh = mmap(NULL, larger * sizeof *fresh, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED)
        return false;
    for (size_t i = 0; i < capacity; i++)
        if (table[i].kind != RECORD_NONE)
            fresh[place_of(fresh, larger, table[i].kind, table[i].key)] = table[i];
    if (table != NULL)
        munmap(table, capacity * sizeof *table);
    table = fresh;
    capacity = larger;
    return true;
}

/* Removes one and moves up what probed past it, so that no tombstones are needed. */
static void remove_at(size_t hole) {
    size_t i = hole;
    for (;;) {
        i = (i + 1) & (capacity - 1);
        if (table[i].kind == RECORD_NONE)
            break;
        size_t home = home_of(table[i].kind, table[i].key, capacity);
        if (((i - home) & (capacity - 1)) >= ((i - hole) & (capacity - 1))) {
            table[hole] = table[i];
            hole = i;
        }
    }
    table[hole].kind = RECORD_NONE;
    used--;
}

bool records_put(enum record_kind kind, uint64_t key, uint64_t bytes, uint64_t owner, uint32_t count) {
    bool done = true;
    lock_take(&table_lock);
    if ((used + 1) * 4 > capacity * 3)
        done = grow() || used + 1 < capacity; /* fuller than liked is better than refused */
    if (done) {
        size_t i = place_of(table, capacity, kind, key);
        if (table[i].kind == RECORD_NONE)
            used++;
        table[i] = (struct record){key, bytes, owner, count, kind};
    }
    lock_give(&table_lock);
    return done;
}

static bool find(enum record_kind kind, uint64_t key, struct record *found, bool take) {
    bool there = false;
    lock_take(&table_lock);
    if (capacity != 0) {
        size_t i = place_of(table, capacity, kind, key);
        there = table[i].kind != RECORD_NONE;
        if (there) {
            *found = table[i];
            if (take)
                remove_at(i);
        }
    }
    lock_give(&table_lock);
    return there;
}

bool records_get(enum record_kind kind, uint64_t key, struct record *found) {
    return find(kind, key, found, false);
}

bool records_take(enum record_kind kind, uint64_t key, struct record *found) {
    return find(kind, key, found, true);
}

bool records_covering(enum record_kind kind, uint64_t at, struct record *found) {
    bool there = false;
    lock_take(&table_lock);
    for (size_t i = 0; i < capacity && !there; i++) {
        there = table[i].kind == kind && table[i].key <= at && at - table[i].key < table[i].bytes;
        if (there)
            *found = table[i];
    }
    lock_give(&table_lock);
    return there;
}

static bool dies_with(const struct record *r, uint64_t context) {
    return r->kind != RECORD_NONE && r->kind <= RECORD_OF_CONTEXT && r->owner == context;
}

uint64_t records_drop_context(uint64_t context) {
    uint64_t bytes = 0;
    lock_take(&table_lock);
    for (size_t i = 0; i < capacity;) {
        if (!dies_with(&table[i], context)) {
            i++;
            continue;
        }
        bytes += table[i].bytes;
        remove_at(i); /* may have moved another one here */
    }
    lock_give(&table_lock);
    return bytes;
}

void records_drop_kind(enum record_kind kind) {
    lock_take(&table_lock);
    for (size_t i = 0; i < capacity;) {
        if (table[i].kind == kind)
            remove_at(i);
        else
            i++;
    }
    lock_give(&table_lock);
}

void records_reset(void) {
    table = NULL; /* not unmapped: another thread of the parent may have been growing it */
    capacity = used = 0;
    atomic_store_explicit(&table_lock.word, 0, memory_order_relaxed);
}
