/* The shared account of a container: the state file, mapped by every process that uses CUDA.
 *
 * The agent creates the file for one start of one container, filled with zeros behind its header
 * and mode 0666, since processes of any user must write it. All figures change under one lock in
 * the file. The lock's word names its owner, so that a process killed inside is found out: whoever
 * takes over adds the slots up anew. A process is gone when its PID is, when /proc says zombie, or
 * when the PID was started at another time; one in another PID namespace cannot be judged and keeps
 * what it was charged.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "limiter.h"

#define LIMITS_PATH LIMITER_DIR "/limits"
#define STATE_PATH LIMITER_DIR "/state"

/* The lock's word: 22 bits of PID (the kernel's largest), 9 of the namespace, 1: somebody waits. */
#define PID_MASK 0x003fffffu
#define WAITERS 0x80000000u
#define LOCK_POLL_NS 20000000          /* then the owner's health is looked at */
#ifndef LOCK_GIVE_UP_NS
#define LOCK_GIVE_UP_NS INT64_C(5000000000) /* a stopped owner: refuse rather than hang */
#endif

static struct lock attach_lock;
static struct limits limits;
static _Atomic bool limits_known;
static struct state *state;
static _Atomic(struct slot *) own;
static _Atomic uint64_t uncharge_later; /* frees that could not have the lock */
static uint32_t own_pid, own_ns;
static uint64_t own_started;

extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *);
extern void *__dso_handle __attribute__((visibility("hidden")));

/* ---- processes -------------------------------------------------------------------------------- */

struct stat_fields {
    char state;
    uint64_t threads, started;
};

/* /proc/PID/stat; `pid` as text. False: there is none, or /proc is hidden. */
static bool read_stat(const char *pid, struct stat_fields *fields) {
    char path[32] = "/proc/", text[1024];
    size_t at = strlen(path);
    memcpy(path + at, pid, strlen(pid));
    memcpy(path + at + strlen(pid), "/stat", 6);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return false;
    text[length] = '\0';
    const char *p = strrchr(text, ')'); /* the name before it may hold anything */
    if (p == NULL || p[1] != ' ')
        return false;
    p += 2;
    fields->state = *p;
    for (int field = 3; field <= 22; field++) {
        uint64_t value = 0;
        const char *digit = p;
        while (*digit >= '0' && *digit <= '9')
            value = value * 10 + (uint64_t)(*digit++ - '0');
        if (field == 20)
            fields->threads = value;
        if (field == 22)
            fields->started = value;
        p = strchr(p, ' ');
        if (p == NULL)
            return false;
        p++;
    }
    return true;
}

static void write_pid(char *text, uint32_t pid) {
    char digits[12];
    size_t n = 0;
    do {
        digits[n++] = (char)('0' + pid % 10);
        pid /= 10;
    } while (pid != 0);
    while (n > 0)
        *text++ = digits[--n];
    *text = '\0';
}

/* `started` 0: not known, only the PID counts. In doubt a process is alive. */
static bool process_alive(uint32_t pid, uint64_t started) {
    char text[12];
    struct stat_fields fields;
    if (kill((pid_t)pid, 0) != 0 && errno == ESRCH)
        return false;
    write_pid(text, pid);
    if (!read_stat(text, &fields))
        return true;
    /* A thread group whose first thread ended shows Z while the others go on. */
    if ((fields.state == 'Z' || fields.state == 'X') && fields.threads <= 1)
        return false;
    return started == 0 || fields.started == 0 || fields.started == started;
}

static bool slot_alive(struct slot *slot) {
    uint32_t ns = atomic_load_explicit(&slot->pid_ns, memory_order_relaxed);
    if (ns != own_ns || ns == 0)
        return true;
    return process_alive(atomic_load_explicit(&slot->pid, memory_order_relaxed),
                         atomic_load_explicit(&slot->started, memory_order_relaxed));
}

static void learn_identity(void) {
    struct stat_fields fields = {0};
    struct stat ns;
    own_pid = (uint32_t)getpid();
    own_ns = stat("/proc/self/ns/pid", &ns) == 0 ? (uint32_t)ns.st_ino : 0;
    own_started = read_stat("self", &fields) ? fields.started : 0;
}

/* ---- the shared lock -------------------------------------------------------------------------- */

static uint64_t load(_Atomic uint64_t *value) { return atomic_load_explicit(value, memory_order_relaxed); }
static void store(_Atomic uint64_t *to, uint64_t value) {
    atomic_store_explicit(to, value, memory_order_relaxed);
}

static uint32_t slots_high(void) {
    uint32_t high = atomic_load_explicit(&state->slots_high, memory_order_relaxed);
    return high < STATE_SLOTS ? high : STATE_SLOTS;
}

static uint32_t lock_name(void) { return (own_pid & PID_MASK) | ((own_ns & 0x1ffu) << 22); }

/* After an owner died inside: the slots are the truth, the total follows. */
static void recount(void) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < slots_high(); i++)
        if (atomic_load_explicit(&state->slots[i].pid, memory_order_relaxed) != 0)
            total += load(&state->slots[i].bytes);
    store(&state->total, total);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool lock_slowly(uint32_t mine) {
    int64_t give_up = now_ns() + LOCK_GIVE_UP_NS;
    for (;;) {
        uint32_t word = atomic_load_explicit(&state->lock, memory_order_relaxed);
        if (word == 0) {
            /* Others may still wait: the bit stays set until somebody finds nobody. */
            if (atomic_compare_exchange_strong_explicit(&state->lock, &word, mine | WAITERS,
                                                        memory_order_acquire, memory_order_relaxed))
                return true;
            continue;
        }
        if (!(word & WAITERS)) {
            if (!atomic_compare_exchange_strong_explicit(&state->lock, &word, word | WAITERS,
                                                         memory_order_relaxed, memory_order_relaxed))
                continue;
            word |= WAITERS;
        }
        futex_wait(&state->lock, word, LOCK_POLL_NS);
        if (atomic_load_explicit(&state->lock, memory_order_relaxed) != word)
            continue;
        uint32_t owner = word & ~WAITERS;
        if ((owner >> 22) == (mine >> 22) && owner != mine && !process_alive(owner & PID_MASK, 0) &&
            atomic_compare_exchange_strong_explicit(&state->lock, &word, mine | WAITERS,
                                                    memory_order_acquire, memory_order_relaxed)) {
            recount();
            return true;
        }
        if (now_ns() > give_up)
            return false;
    }
}

bool account_lock(void) {
    uint32_t free = 0, mine = lock_name();
    return LIKELY(atomic_compare_exchange_strong_explicit(&state->lock, &free, mine, memory_order_acquire,
                                                          memory_order_relaxed)) ||
           lock_slowly(mine);
}

void account_unlock(void) {
    if (UNLIKELY(atomic_exchange_explicit(&state->lock, 0, memory_order_release) & WAITERS))
        futex_wake(&state->lock);
}

/* ---- charging; with the lock held ------------------------------------------------------------- */

static void add(struct slot *slot, uint64_t bytes) {
    /* Slot first: if we die in between, recount() finds it. */
    uint64_t slot_bytes = load(&slot->bytes) + bytes, total = load(&state->total) + bytes;
    store(&slot->bytes, slot_bytes);
    store(&state->total, total);
    if (slot_bytes > load(&slot->peak))
        store(&slot->peak, slot_bytes);
    if (total > load(&state->peak))
        store(&state->peak, total);
}

static void take_away(struct slot *slot, uint64_t bytes) {
    uint64_t slot_bytes = load(&slot->bytes), total = load(&state->total);
    bytes = bytes < slot_bytes ? bytes : slot_bytes;
    store(&slot->bytes, slot_bytes - bytes);
    store(&state->total, bytes < total ? total - bytes : 0);
}

static void empty_slot(struct slot *slot) {
    take_away(slot, load(&slot->bytes));
    atomic_store_explicit(&slot->pid, 0, memory_order_relaxed);
}

/* Without the lock, since looking at a thousand processes takes long: taken for each that is gone. */
static void reclaim(void) {
    struct slot *mine = atomic_load_explicit(&own, memory_order_relaxed);
    for (uint32_t i = 0; i < slots_high(); i++) {
        struct slot *slot = &state->slots[i];
        uint32_t pid = atomic_load_explicit(&slot->pid, memory_order_relaxed);
        uint64_t started = load(&slot->started);
        if (slot == mine || pid == 0 || slot_alive(slot) || !account_lock())
            continue;
        if (atomic_load_explicit(&slot->pid, memory_order_relaxed) == pid && load(&slot->started) == started) {
            empty_slot(slot);
            store(&state->reclaimed, load(&state->reclaimed) + 1);
        }
        account_unlock();
    }
}

static bool has_room(uint64_t bytes) {
    uint64_t total = load(&state->total);
    return total <= limits.memory_bytes && bytes <= limits.memory_bytes - total;
}

/* ---- attaching -------------------------------------------------------------------------------- */

static const char *map_state(void) {
    struct stat status;
    int fd = open(STATE_PATH, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return errno == EACCES ? "it may not be written by this user" : "it cannot be opened";
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size != (off_t)sizeof(struct state)) {
        close(fd);
        return "it has the wrong size";
    }
    struct state *mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED)
        return "it cannot be mapped";
    if (load(&mapped->magic) != STATE_MAGIC ||
        atomic_load_explicit(&mapped->version, memory_order_relaxed) != STATE_VERSION ||
        atomic_load_explicit(&mapped->slot_count, memory_order_relaxed) != STATE_SLOTS) {
        munmap(mapped, sizeof *mapped);
        return "it is of another version";
    }
    state = mapped;
    return NULL;
}

/* Finds a slot; with the lock held. Our own PID in one is what we were before exec: empty it. */
static struct slot *find_slot(void) {
    struct slot *free = NULL;
    uint32_t high = slots_high();
    for (uint32_t i = 0; i < high; i++) {
        struct slot *slot = &state->slots[i];
        uint32_t pid = atomic_load_explicit(&slot->pid, memory_order_relaxed);
        if (pid == own_pid && atomic_load_explicit(&slot->pid_ns, memory_order_relaxed) == own_ns)
            empty_slot(slot);
        else if (pid != 0)
            continue;
        if (free == NULL)
            free = slot;
    }
    if (free == NULL && high < STATE_SLOTS) {
        free = &state->slots[high];
        atomic_store_explicit(&state->slots_high, high + 1, memory_order_relaxed);
    }
    return free;
}

/* With the lock held. NULL: taken; else what there is none of. */
static const char *take_slot(void) {
    struct slot *slot = find_slot();
    if (slot == NULL)
        return "it has no free slot";
    if (!has_room(limits.overhead_bytes)) {
        store(&state->refused, load(&state->refused) + 1);
        store(&state->last_refused_bytes, limits.overhead_bytes);
        return "the limit is reached";
    }
    store(&slot->bytes, 0);
    store(&slot->peak, 0);
    store(&slot->refused, 0);
    store(&slot->started, own_started);
    atomic_store_explicit(&slot->pid_ns, own_ns, memory_order_relaxed);
    atomic_store_explicit(&slot->pid, own_pid, memory_order_relaxed);
    add(slot, limits.overhead_bytes);
    atomic_store_explicit(&own, slot, memory_order_release);
    return NULL;
}

static bool know_limits(void) {
    if (LIKELY(atomic_load_explicit(&limits_known, memory_order_acquire)))
        return true;
    const char *wrong = limits_read(LIMITS_PATH, &limits);
    if (wrong != NULL) {
        complain_once(LIMITS_PATH, wrong);
        return false;
    }
    atomic_store_explicit(&limits_known, true, memory_order_release);
    return true;
}

bool account_know_limits(void) {
    lock_take(&attach_lock);
    bool known = know_limits();
    lock_give(&attach_lock);
    return known;
}

static bool attach(void) {
    static bool fork_watched;
    const char *wrong;
    if (!know_limits())
        return false;
    if (state == NULL && (wrong = map_state()) != NULL) {
        complain_once(STATE_PATH, wrong);
        return false;
    }
    if (!fork_watched && __register_atfork(NULL, NULL, forked_child, &__dso_handle) == 0)
        fork_watched = true;
    learn_identity();
    if (!fork_watched)
        return false;
    for (int attempt = 0; attempt < 2; attempt++) {
        if (attempt != 0)
            reclaim();
        if (!account_lock())
            return false;
        wrong = take_slot();
        account_unlock();
        if (wrong == NULL)
            return true;
    }
    complain_once(STATE_PATH, wrong);
    return false;
}

bool account_attach(void) {
    if (LIKELY(atomic_load_explicit(&own, memory_order_acquire) != NULL))
        return true;
    lock_take(&attach_lock);
    bool attached = atomic_load_explicit(&own, memory_order_acquire) != NULL || attach();
    lock_give(&attach_lock);
    return attached;
}

void forked_child(void) {
    atomic_store_explicit(&own, NULL, memory_order_relaxed);
    atomic_store_explicit(&uncharge_later, 0, memory_order_relaxed);
    atomic_store_explicit(&attach_lock.word, 0, memory_order_relaxed);
    resolve_reset();
    records_reset();
    contexts_reset();
    physical_reset();
    pools_reset();
    graphs_reset();
    compute_reset();
}

/* ---- for the other files; after account_attach ------------------------------------------------ */

static void take_away_late(struct slot *slot) {
    if (UNLIKELY(load(&uncharge_later) != 0))
        take_away(slot, atomic_exchange_explicit(&uncharge_later, 0, memory_order_relaxed));
}

bool account_charge(uint64_t bytes) {
    struct slot *slot = atomic_load_explicit(&own, memory_order_acquire);
    for (int attempt = 0; slot != NULL && attempt < 2; attempt++) {
        if (UNLIKELY(attempt != 0))
            reclaim();
        if (!account_lock())
            return false;
        take_away_late(slot);
        bool room = has_room(bytes);
        if (room)
            add(slot, bytes);
        account_unlock();
        if (LIKELY(room))
            return true;
    }
    return false;
}

void account_charge_anyway(uint64_t bytes) {
    struct slot *slot = atomic_load_explicit(&own, memory_order_acquire);
    if (slot == NULL || !account_lock())
        return;
    add(slot, bytes);
    account_unlock();
}

void account_uncharge(uint64_t bytes) {
    struct slot *slot = atomic_load_explicit(&own, memory_order_acquire);
    if (slot == NULL || bytes == 0)
        return;
    if (!account_lock()) {
        atomic_fetch_add_explicit(&uncharge_later, bytes, memory_order_relaxed);
        return;
    }
    take_away(slot, bytes);
    account_unlock();
}

uint64_t account_used(void) {
    reclaim();
    if (!account_lock())
        return UINT64_MAX;
    uint64_t total = load(&state->total);
    account_unlock();
    return total;
}

void account_refused(uint64_t bytes) {
    struct slot *slot = atomic_load_explicit(&own, memory_order_acquire);
    if (slot == NULL || !account_lock())
        return;
    store(&slot->refused, load(&slot->refused) + 1);
    store(&state->refused, load(&state->refused) + 1);
    store(&state->last_refused_bytes, bytes);
    account_unlock();
}

const struct limits *account_limits(void) { return &limits; }

struct state *account_state(void) { return state; }

void complain_once(const char *what, const char *why) {
    static _Atomic bool complained;
    const char *parts[] = {"edgeagent: GPU refused to this process: ", what, ": ", why, "\n"};
    char line[256];
    size_t length = 0;
    if (atomic_exchange_explicit(&complained, true, memory_order_relaxed))
        return;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (const char *c = parts[i]; *c != '\0' && length < sizeof line; c++)
            line[length++] = *c;
    if (write(STDERR_FILENO, line, length) < 0)
        return; /* nowhere to say it */
}
